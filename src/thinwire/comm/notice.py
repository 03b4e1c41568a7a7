"""Says what a worker waits for, when it waits long; and lines of which there may be many."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ..messages import log

NOTICE_SECONDS = 5.0
START_SECONDS = 30.0
"""How long workers wait for a Lighthouse or a relay, which may start after them."""
FLOOD_SECONDS = 1.0


@contextmanager
def said_if_late(text: str) -> Iterator[None]:
    """Context that logs a text once if it lasts longer than `NOTICE_SECONDS`.

    Of the workers that a launcher started on this machine, the first one says it.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        yield
        return
    timer = threading.Timer(NOTICE_SECONDS, log.info, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Flood:
    """Warnings that others cause, such as callers that are refused: in a flood of them, one a second is said.

    Args:
        burst: how many are said at once, after a silence.
    """

    def __init__(self, burst: int = 1):
        self._burst, self._left, self._since = burst, float(burst), time.monotonic()
        self._lock, self._unsaid = threading.Lock(), 0

    def warn(self, text: str, *values: object) -> None:
        """Log a text, as `log.warning` does, with the number of those before it that were not said; or count it."""
        with self._lock:
            now = time.monotonic()
            self._left = min(self._burst, self._left + (now - self._since) / FLOOD_SECONDS)
            self._since = now
            if self._left < 1:
                self._unsaid += 1
                return
            more = f" (and {self._unsaid} others before)" if self._unsaid else ""
            self._left, self._unsaid = self._left - 1, 0
        log.warning(f"{text}%s", *values, more)
