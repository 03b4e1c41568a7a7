"""Files that are made once and read ever after: decoded images, vocabularies, encoded text.

They lie in `$XDG_CACHE_HOME/thinwire` (`~/.cache/thinwire` where that is not set) under a name that changes with what they
were made from, so that they need no upkeep; the folder may be deleted at any time. A file appears whole or not at all;
where several workers want the same file, one makes it and the others wait.
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


def cache_folder() -> Path:
    """Where cached files lie."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "thinwire"


def cached(name: str, made_from: str, make: Callable[[Path], None]) -> Path:
    """Path of a file that `make(path)` has written, now or earlier.

    Args:
        name: what it is, with its suffix.
        made_from: text that differs wherever the file's content would; see `fingerprint`.
        make: writes the file to the path that it is given.
    """
    digest = hashlib.sha256(made_from.encode()).hexdigest()[:16]
    path = cache_folder() / f"{digest}-{name}"
    if not path.exists():
        with locked(path):
            if not path.exists():
                write_whole(path, make)
    return path


def cached_tensors(name: str, made_from: str, make: Callable[[], Any]) -> Any:
    """Tensors (in lists, tuples or dictionaries) that `make()` returned, now or earlier.

    They are mapped from the file, so that all workers of a machine share the memory.
    """
    path = cached(name, made_from, lambda path: torch.save(make(), path))
    return torch.load(path, weights_only=True, mmap=True)


def fingerprint(paths: list[Path]) -> str:
    """Text that changes with the files' names, sizes and times of change; the files are not read."""
    digest = hashlib.sha256()
    for path in paths:
        found = path.stat()
        digest.update(f"{path.absolute()} {found.st_size} {found.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write(temporary)` write a file beside `path`, then give it its name; on an error, nothing is left."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other processes out while `path` is made; the lock ends with the process, however it ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(f".{path.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
