"""How long a worker may make no progress: it follows from the pace of the last rounds."""

from __future__ import annotations

import time
from collections import deque

MIN_SECONDS = 10.0
SLACK = 4.0
"""Times the longest of the last rounds."""
KNOWN_ROUNDS = 5
"""Before so many rounds of the same workers, the pace is not known."""


class Pace:
    """Measures the rounds of the same workers.

    Args:
        limit_seconds: patience is never longer.

    Example:
        >>> pace = Pace(180.0)
        >>> pace.patience_seconds
        180.0
        >>> for _ in range(5):
        ...     pace.committed()
        >>> pace.patience_seconds
        10.0
    """

    def __init__(self, limit_seconds: float):
        self._limit_seconds = limit_seconds
        self._seconds: deque[float] = deque(maxlen=100)
        self._since = time.monotonic()

    @property
    def patience_seconds(self) -> float:
        """Without progress for so long, a worker counts as stuck."""
        if len(self._seconds) < KNOWN_ROUNDS:
            return self._limit_seconds
        return min(self._limit_seconds, max(MIN_SECONDS, SLACK * max(self._seconds)))

    def committed(self) -> None:
        """A round has ended."""
        self._seconds.append(time.monotonic() - self._since)
        self.resume()

    def resume(self) -> None:
        """A round begins, or goes on after a pause that all workers make."""
        self._since = time.monotonic()

    def forget(self) -> None:
        """Other workers take part."""
        self._seconds.clear()
        self.resume()
