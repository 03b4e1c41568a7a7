"""End a process with its parent, also where it is stopped (SIGSTOP) and can run no code of its own.

The workers of a run are children of Python's fork server, which is a child of the launcher. The fork server imports this
module before it forks, and so ends with the launcher; each worker calls `end_with_parent`, and so ends with the fork server.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from typing import Any

PR_SET_PDEATHSIG = 1  # of Linux' prctl.h
_server: int | None = None  # the fork server's process, also in its children, which are forked from it


def end_with_parent() -> None:
    """End this process with its parent, and a child of the fork server with the launcher too, also if they have ended already.

    Linux sends SIGKILL when the parent ends. A thread waits for the launcher's end, which is all that other systems have.
    """
    _die_with_parent()
    if (launcher := multiprocessing.parent_process()) is not None:
        # A fork server that is still importing outlives the launcher, and then starts the workers that it was asked for.
        threading.Thread(target=_end_with, args=(launcher,), daemon=True).start()


def _end_with(launcher: Any) -> None:
    launcher.join()  # returns when it has ended, however it ended
    os._exit(1)


def _die_with_parent() -> None:
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if _server is not None and os.getpid() != _server != os.getppid():
        os.kill(os.getpid(), signal.SIGKILL)


def become_fork_server() -> None:
    """End this process with its parent, and its children, which call `end_with_parent`, with this process."""
    global _server
    _server = os.getpid()
    _die_with_parent()


def is_fork_server() -> bool:
    """Whether this process is Python's fork server."""
    return any("multiprocessing.forkserver" in argument for argument in sys.orig_argv)


if is_fork_server():
    become_fork_server()
