"""Where the time goes: seconds by phase, and the same phases as ranges in a profiler's trace."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from torch.profiler import record_function


class Clock:
    """Adds up wall-clock seconds by phase; several threads may be in a phase at once.

    Example:
        >>> clock = Clock()
        >>> with clock("encode"):
        ...     pass
        >>> sorted(clock.seconds)
        ['encode']
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._lock = threading.Lock()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time a phase; a profiler shows it as `thinwire::<phase>`."""
        start = time.perf_counter()
        try:
            with record_function(f"thinwire::{phase}"):
                yield
        finally:
            with self._lock:
                self.seconds[phase] += time.perf_counter() - start
