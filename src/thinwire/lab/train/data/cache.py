"""A cache of files that are made once: decoded images, vocabularies, encoded text.

The folder is `$XDG_CACHE_HOME/thinwire`, or `~/.cache/thinwire` if that is not set. The name of a file depends on its sources,
so it is never out of date, and the folder may be deleted at any time. A file is written completely or not at all. If several
workers need the same file, one makes it and the others wait.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ....algorithm import able_to
from ....messages import error_text
from ...files import write_whole

REMEDY = "name a folder for it with XDG_CACHE_HOME"


def cache_folder() -> Path:
    """The folder of cached files.

    Raises:
        ValueError: this user has no home, as one in a container whose number the system does not know.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "thinwire"
    except RuntimeError:
        raise ValueError(f"there is no home folder, and so no place for a cache; {REMEDY}") from None


def cached(name: str, made_from: str, make: Callable[[Path], None]) -> Path:
    """Return the path of a file that `make(path)` writes, unless it is cached.

    Args:
        name: name of the file, with its suffix.
        made_from: text that differs if the content of the file would differ; see `fingerprint`.
        make: writes the file to a given path.
    """
    digest = hashlib.sha256(made_from.encode()).hexdigest()[:16]
    path = cache_folder() / f"{digest}-{name}"
    # Most often it is there, and no lock is needed.
    if not path.exists():
        with locked(path, REMEDY):
            # Another process may have made it while this one waited.
            if not path.exists():
                write_whole(path, make)
    return path


def cached_tensors(name: str, made_from: str, make: Callable[[], Any]) -> Any:
    """Return the tensors (in lists, tuples or dictionaries) of `make()`, unless they are cached.

    They are mapped from the file, so all workers of a machine share the memory.
    """
    path = cached(name, made_from, lambda path: torch.save(make(), path))
    with reading(path):
        return torch.load(path, weights_only=True, mmap=True)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Context in which a cached file is read.

    Raises:
        ValueError: it is damaged, as one may be after the machine went down.
    """
    try:
        yield
    except Exception as error:  # of PyTorch's reader or another package's
        reason = " ".join(error_text(error).split())[:100]
        raise ValueError(f"{path} in the cache is damaged ({reason}); remove it, and it is made anew") from error


def fingerprint(paths: list[Path]) -> str:
    """Text that changes with the names, sizes and modification times of the files; it does not read them."""
    digest = hashlib.sha256()
    for path in paths:
        found = path.stat()
        digest.update(f"{path.absolute()} {found.st_size} {found.st_mtime_ns}\n".encode())
    return digest.hexdigest()


@contextmanager
def locked(path: Path, remedy: str = "choose another folder") -> Iterator[None]:
    """Lock out other processes while `path` is made; the lock ends with the process in any case.

    Args:
        path: of a file.
        remedy: what to do if nothing can be written there.

    Raises:
        ValueError: nothing can be written beside `path`, or no file locked.
    """
    with able_to(f"write to {path.parent}", remedy):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open(path.with_name(f".{path.name}.lock"), "w")  # `os.replace` gives `path` another inode
    with lock:
        with able_to(f"lock a file in {path.parent}", "choose a folder on a file system that has locks"):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
