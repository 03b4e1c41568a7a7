"""How long a worker may make no progress: it follows from how long the last rounds took."""

from __future__ import annotations

import time
from collections import deque

MIN_SECONDS = 10.0
SLACK = 4.0
"""Times the longest of the last rounds."""
KNOWN_ROUNDS = 5
"""Before so many rounds of the same workers, patience is the limit."""


class Patience:
    """How long to wait, from the longest of the last rounds of the same workers.

    Args:
        limit_seconds: patience is never longer.

    Example:
        >>> patience = Patience(180.0)
        >>> patience.seconds
        180.0
        >>> for _ in range(5):
        ...     patience.committed()
        >>> patience.seconds
        10.0
    """

    def __init__(self, limit_seconds: float):
        self._limit_seconds = limit_seconds
        self._lasted: deque[float] = deque(maxlen=100)
        self._since = time.monotonic()

    @property
    def seconds(self) -> float:
        """Without progress for so long, a worker counts as stuck."""
        if len(self._lasted) < KNOWN_ROUNDS:
            return self._limit_seconds
        return min(self._limit_seconds, max(MIN_SECONDS, SLACK * max(self._lasted)))

    def committed(self) -> None:
        """A round has ended."""
        self._lasted.append(time.monotonic() - self._since)
        self.resume()

    def resume(self) -> None:
        """A round begins, or goes on after a pause that all workers make."""
        self._since = time.monotonic()

    def forget(self) -> None:
        """Other workers take part."""
        self._lasted.clear()
        self.resume()
