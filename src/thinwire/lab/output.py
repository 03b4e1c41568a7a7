"""Standard output, for a command that may outlive its terminal, and in a locale that lacks characters."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import sys
from collections.abc import Iterator
from typing import IO, cast

from ..messages import log

FULL = (errno.ENOSPC, errno.EDQUOT)  # a disk
UNREAD = (errno.EPIPE, errno.EIO)  # a pipe without a reader, or a closed terminal


def prepare_output() -> None:
    """Let stdout write "?" for a character that its encoding lacks, and open the standard streams that are closed.

    A file or a connection would get the number of a closed one, as after `>&-`, and whatever is printed.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, "w" if descriptor else "r", closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def output_is_read() -> bool:
    """Whether stdout still has a reader. Without one, as after `| head`, what is left to print is dropped."""
    waiting = select.poll()
    waiting.register(1, 0)  # hang-ups and errors are reported unasked
    if not waiting.poll(0):
        return True
    drop(1)
    return False


def drop(descriptor: int) -> None:
    """Send what is written to an open file to nowhere. Python flushes stdout once more when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


class WhileOpen(io.TextIOBase):
    """Standard output for what work says while it goes on; the work outlives its terminal, and whoever reads a pipe.

    Once writing fails, also because the disk is full, whatever this process prints is dropped. A character that the encoding
    lacks becomes "?".
    """

    def __init__(self) -> None:
        self._stream = sys.stdout

    @property
    def encoding(self) -> str:  # type: ignore[override]  # only read
        """That of stdout."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    @property
    def as_text(self) -> IO[str]:
        """This stream, for callers whose types know files alone."""
        return cast("IO[str]", self)

    def isatty(self) -> bool:
        """Whether stdout is a terminal."""
        return self._stream is not None and self._stream.isatty()

    def write(self, text: str) -> int:
        """Write it, unless that has failed."""
        if self._stream is not None:
            with self._dropping():
                self._stream.write(text.encode(self.encoding, "replace").decode(self.encoding))
        return len(text)

    def flush(self) -> None:
        """Flush stdout."""
        if self._stream is not None:
            with self._dropping():
                self._stream.flush()

    @contextlib.contextmanager
    def _dropping(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            stream, self._stream = self._stream, None
            with contextlib.suppress(OSError):  # it is no file
                drop(stream.fileno())
            log.warning(f"what follows is not shown: stdout fails ({error.strerror or error})")
