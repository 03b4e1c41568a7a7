"""Waits of background threads in C++ and Rust, which are over before Python finalizes.

A daemon thread may be in such a wait when the process ends. If it comes back while Python finalizes, Python ends the thread,
through destructors of C++ or Rust that may not be left so, and that aborts the process in place of its exit code. (Python 3.14
leaves such threads asleep instead.) The engine of our own connections looks after itself: see `native/wire/bind.cpp`.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from typing import Any

EXIT_SECONDS = 2.0  # for the waits to end

_waiting: dict[int, Callable[[], object]] = {}  # by thread: what ends its wait
_is_ending = False


def wait_at_most_until_exit(wait: Callable[[], Any], interrupt: Callable[[], object] = lambda: None) -> None:
    """Call `wait`. If the process ends meanwhile, `interrupt` is called, and the wait has two seconds to end.

    Example:
        >>> import threading
        >>> come = threading.Event()
        >>> waiting = threading.Thread(target=wait_at_most_until_exit, args=(come.wait, come.set), daemon=True)
        >>> waiting.start()  # and the process could end
        >>> come.set()
    """
    thread = threading.get_ident()
    _waiting[thread] = interrupt
    try:
        if _is_ending and threading.current_thread() is not threading.main_thread():
            del _waiting[thread]
            threading.Event().wait()  # it has come too late, and sleeps until the process is gone
        wait()
    finally:
        _waiting.pop(thread, None)


@atexit.register
def _end_waits() -> None:
    global _is_ending
    _is_ending = True
    for interrupt in list(_waiting.values()):
        interrupt()
    deadline = time.monotonic() + EXIT_SECONDS
    while _waiting and time.monotonic() < deadline:
        time.sleep(0.001)


os.register_at_fork(after_in_child=_waiting.clear)  # a fork does not have the threads
