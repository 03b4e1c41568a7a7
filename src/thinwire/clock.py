"""Where the time goes: seconds by phase, and the same phases as ranges in a profiler's trace."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from contextlib import AbstractContextManager
from types import TracebackType

import torch
from torch.autograd import profiler

from .streams import current_stream

MOST_PENDING = 64
"""Phases of a GPU whose events are kept before the clock looks which of them are over."""


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
        self._idle: deque[torch.cuda.Event] = deque()  # events of phases that were added up, for later ones
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

    def __call__(self, phase: str) -> AbstractContextManager[None]:
        """Time a phase; a profiler shows it as `thinwire::<phase>`."""
        return _Phase(self, phase)

    def _event(self) -> torch.cuda.Event:
        try:
            event = self._idle.pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True)
        event.record(current_stream(self.device))
        return event

    def _add_first(self) -> None:
        phase, began, ended = self._pending.popleft()
        self._seconds[phase] += began.elapsed_time(ended) / 1000
        self._idle += began, ended


class _Phase:
    """One phase under way. A class: a generator costs several times as much, and a step has about forty phases."""

    __slots__ = ("_began", "_clock", "_name", "_range", "_start")

    def __init__(self, clock: Clock, name: str) -> None:
        self._clock, self._name = clock, name

    def __enter__(self) -> None:
        clock = self._clock
        self._start, self._began = time.perf_counter(), clock._event() if clock.device.type == "cuda" else None
        # Leaving a range releases the interpreter's lock, so there is one only where a profiler looks, in any thread.
        self._range = profiler.record_function(f"thinwire::{self._name}") if profiler._is_profiler_enabled else None
        if self._range is not None:
            self._range.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._range is not None:
            self._range.__exit__(kind, error, traceback)
        clock = self._clock
        with clock._lock:
            if self._began is None:
                clock._seconds[self._name] += time.perf_counter() - self._start
            else:
                clock._pending.append((self._name, self._began, clock._event()))
                if len(clock._pending) > MOST_PENDING:
                    while clock._pending and clock._pending[0][2].query():
                        clock._add_first()
