"""Work of background threads in C++ and Rust, which is over before Python finalizes.

If a daemon thread comes back from C++ or Rust while Python finalizes, Python ends the thread, through destructors that may not
be left so, and that aborts the process in place of its exit code. (Python 3.14 leaves such threads asleep instead.) So our
threads work in `until_exit`. Where the process ends meanwhile, what they wait for is closed, and they have two seconds. Then
they sleep until the process is gone: the destructors of what they hold, such as PyTorch's works, come back to Python too. The
engine of our own connections looks after the threads that it serves: see `native/wire/bind.cpp`.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import finalize

EXIT_SECONDS = 2.0  # for threads to end what they do

_at_work: dict[int, Callable[[], object]] = {}  # by thread: what ends its wait
_before: dict[finalize[..., Any], None] = {}
_afterwards: list[Callable[[], object]] = []
_is_ending = False
_never = threading.Lock()
_never.acquire()


def before_work_ends(finalizer: finalize[..., Any]) -> None:
    """Call this finalizer at the end of the process, before threads are waited for, unless its object is gone by then."""
    for earlier in list(_before):
        if not earlier.alive:
            _before.pop(earlier, None)
    _before[finalizer] = None


def after_work(call: Callable[[], object]) -> None:
    """Call this at the end of the process, when threads are through with their work."""
    _afterwards.append(call)


@contextmanager
def until_exit(interrupt: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Context for work in C++ or Rust. If the process ends meanwhile, `interrupt` is called, and the thread is waited for.

    Contexts may be nested; the inner one's `interrupt` counts. A thread that enters one while the process ends, or leaves the
    outer one then, stays there.

    Example:
        >>> import threading
        >>> come = threading.Event()
        >>> def wait():
        ...     with until_exit(come.set):
        ...         come.wait()
        >>> waiting = threading.Thread(target=wait, daemon=True)
        >>> waiting.start()  # and the process could end
        >>> come.set()
    """
    thread = threading.get_ident()
    outer = _at_work.get(thread)
    _at_work[thread] = interrupt
    try:
        if _is_ending:
            _stay(thread)  # it has come too late
        yield
    finally:
        if outer is None:
            if _is_ending:
                _stay(thread)
            _at_work.pop(thread, None)
        else:
            _at_work[thread] = outer


def _stay(thread: int) -> None:
    """Sleep until the process is gone, if it is not the main thread that ends it."""
    if threading.current_thread() is not threading.main_thread():
        # Nothing lies between these two: Python cannot go on to finalize before the thread sleeps.
        del _at_work[thread]
        _never.acquire()


def _end_work() -> None:
    global _is_ending
    _is_ending = True
    for finalizer in list(_before):
        finalizer()
    for interrupt in list(_at_work.values()):
        interrupt()
    now = time.monotonic()
    half, end = now + EXIT_SECONDS / 2, now + EXIT_SECONDS
    while _at_work and time.monotonic() < end:
        time.sleep(0.001)
        if time.monotonic() > half:  # a long computation ends where it is next in Python
            half = end
            for thread in list(_at_work):
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(SystemExit))
    for call in _afterwards:
        call()


# Python runs handlers in the reverse order of their registration. So this one runs before that of all finalizers, which Python
# registers with the first of them: it goes through a table, and fails if a thread makes or drops a finalizer meanwhile.
finalize(until_exit, _end_work).detach()
atexit.register(_end_work)
os.register_at_fork(after_in_child=_at_work.clear)  # a fork does not have the threads
