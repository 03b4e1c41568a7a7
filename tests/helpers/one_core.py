"""Threads that share one core.

PyTorch gives Python's lock up in each operation. Threads on several cores wake each other each time, which takes two to three
times as long as the small operations of tests do.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Context in which this thread, and what it starts, stays on the core where it is; a decorator too."""
    if not hasattr(os, "sched_setaffinity"):  # only Linux can
        yield
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {ctypes.CDLL(None).sched_getcpu()})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
