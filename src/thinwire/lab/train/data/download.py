"""Fetch a file once, with a progress bar and a checksum."""

from __future__ import annotations

import hashlib
from pathlib import Path
from urllib.request import urlopen

from ...files import write_whole
from .cache import locked

CHUNK_BYTES = 1 << 18
SILENT_SECONDS = 20.0  # how long the network may keep silent


def download(url: str, path: Path, num_bytes: int, sha256: str) -> None:
    """Fetch `url` to `path`, unless it is there; several processes may ask at once, and one fetches.

    Args:
        url: what to fetch.
        path: where to put it.
        num_bytes: how large it is.
        sha256: its checksum, in hexadecimal.

    Raises:
        ValueError: it cannot be fetched, or is not the file that was expected; nothing is left at `path`.
    """
    with locked(path):
        # Another process may have fetched it while this one waited.
        if path.exists():
            return
        try:
            write_whole(path, lambda part: _fetch(url, part, num_bytes, sha256))
        except OSError as error:
            raise ValueError(
                f"{path} is missing and {url} cannot be fetched ({error}); "
                f"fetch it elsewhere ({num_bytes:,} bytes) and put it at {path.resolve()}"
            ) from error


def _fetch(url: str, path: Path, num_bytes: int, sha256: str) -> None:
    from rich.console import Console
    from rich.progress import wrap_file

    digest = hashlib.sha256()
    with urlopen(url, timeout=SILENT_SECONDS) as response, open(path, "wb") as out:
        console = Console(stderr=True)
        reader = wrap_file(
            response,
            num_bytes,
            description=url.rpartition("/")[2],
            console=console,
            disable=not console.is_terminal,
        )
        with reader as source:
            while chunk := source.read(CHUNK_BYTES):
                digest.update(chunk)
                out.write(chunk)
    if digest.hexdigest() != sha256:
        raise ValueError(f"{url} gave {path.stat().st_size:,} bytes that are not the file expected; nothing is kept")
