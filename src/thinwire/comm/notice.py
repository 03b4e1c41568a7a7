"""Says what a worker waits for, when it waits long."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

NOTICE_SECONDS = 5.0
START_SECONDS = 30.0
"""How long workers wait for a Lighthouse or a relay, which may start after them."""
log = logging.getLogger("thinwire")


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
