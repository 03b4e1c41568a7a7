"""End a process with its parent, also where it is stopped (SIGSTOP) and can run no code of its own.

The workers of a run are children of Python's fork server, which is a child of the launcher. The fork server imports this
module before it forks, and so ends with the launcher; each worker calls `end_with_parent`, and so ends with the fork server.
"""

from __future__ import annotations

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1  # of Linux' prctl.h


def end_with_parent() -> None:
    """Have the kernel send SIGKILL to this process when its parent ends. Does nothing on other systems than Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def is_fork_server() -> bool:
    """Whether this process is Python's fork server."""
    return any("multiprocessing.forkserver" in argument for argument in sys.orig_argv)


if is_fork_server():
    end_with_parent()
