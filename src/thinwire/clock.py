"""Where the time goes: seconds by phase, and the same phases as ranges in a profiler's trace."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.profiler import record_function


class Clock:
    """Adds up seconds by phase; several threads may be in a phase at once.

    For work in main memory these are the wall-clock seconds of the host. A GPU works later than the host asks it to, so
    there the time of a phase is taken by events on the current stream: from when the stream reaches the phase to when it
    leaves it, waiting included. Reading `seconds` then waits for the device.

    Attributes:
        device: whose work is timed; set it to a GPU for events.

    Example:
        >>> clock = Clock()
        >>> with clock("encode"):
        ...     pass
        >>> sorted(clock.seconds)
        ['encode']
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._seconds: dict[str, float] = defaultdict(float)
        self._pending: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: object) -> Clock:
        """The same clock: copies of a state go on with it."""
        return self

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds so far by phase."""
        with self._lock:
            while self._pending:
                self._pending[0][2].synchronize()
                self._add_first()
            return dict(self._seconds)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time a phase; a profiler shows it as `thinwire::<phase>`."""
        is_on_gpu = self.device.type == "cuda"
        start, began = time.perf_counter(), self._event() if is_on_gpu else None
        try:
            with record_function(f"thinwire::{phase}"):
                yield
        finally:
            with self._lock:
                if began is None:
                    self._seconds[phase] += time.perf_counter() - start
                else:
                    self._pending.append((phase, began, self._event()))
                    while self._pending and self._pending[0][2].query():  # keeps the list short
                        self._add_first()

    def _event(self) -> torch.cuda.Event:
        stream = torch.cuda.current_stream(self.device)
        event: torch.cuda.Event = stream.record_event(torch.cuda.Event(enable_timing=True))
        return event

    def _add_first(self) -> None:
        phase, began, ended = self._pending.popleft()
        self._seconds[phase] += began.elapsed_time(ended) / 1000
