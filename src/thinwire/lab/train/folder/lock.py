"""The lock on a run's folder: one process at a time trains there, and the lock ends with it however it ends.

The lock is a POSIX record lock on the file `.lock` in the folder. Children do not inherit it, and shared file systems know
it on all nodes. The launcher of a run holds it, or rank 0 under torchrun, srun and mpirun.

`filelock` cannot replace this file. It locks with `flock`, which forked data loaders inherit, so that the lock can outlive a
killed run. It also leaves its file behind, and does not go on where a file system has no locks.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...files import is_at

LOCK = ".lock"
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # of a file system that has none


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Context in which this process owns the folder.

    Raises:
        ValueError: another process owns it; the message names it.
        OSError: the folder cannot be written.
    """
    path = folder / LOCK
    descriptor = _open_locked(path)
    try:
        yield
    finally:
        # Somebody may have removed the folder, and another run may have made it anew.
        if is_at(descriptor, path):
            path.unlink(missing_ok=True)
        os.close(descriptor)


def _open_locked(path: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                owner = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
                os.close(descriptor)
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    raise ValueError(_in_use(path.parent, owner)) from None
                raise
        if is_at(descriptor, path):  # else its owner removed the file between our opening and locking it
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
            return descriptor
        os.close(descriptor)


def _in_use(folder: Path, owner: str) -> str:
    return (
        f"{str(folder)!r} belongs to a run that is under way: {owner or 'another process'} is training there; "
        "wait for it, stop it, or choose another --name"
    )
