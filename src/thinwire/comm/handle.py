"""The handle of an operation that may still be in flight, and the error of one that failed."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

from ..messages import error_text

SOURCE = re.compile(r"\[\S+\.(?:cc|cpp|h):\d+\] *")  # where in Gloo's source an error was found
ADVICE = re.compile(r"\.? This is typically caused by .*GLHF! \S*")  # of Gloo, which does not know the workers


class CommunicationError(RuntimeError):
    """A message could not be sent or received."""


def reason_of(error: Exception) -> str:
    """What a backend says about a failure, in one line, without places in its source and its general advice; else `error_text`.

    Example:
        >>> reason_of(RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"))
        'Connection closed by peer'
        >>> reason_of(RuntimeError("Connection reset by peer. This is typically caused by a bug. GLHF! :)"))
        'Connection reset by peer'
    """
    text = str(error) if isinstance(error, (RuntimeError, OSError)) else error_text(error)
    return ADVICE.sub("", " ".join(SOURCE.sub("", text).split()))


Wait = Callable[[], Any]
"""Blocks until an operation that was started is done."""


def nothing() -> None:
    """The wait of an operation that is done."""


class Handle:
    """The result of an operation that may still be in flight.

    Args:
        finish: waits for the operation and returns its result; called once, by the first thread that waits.

    Example:
        >>> Handle(lambda: 42).wait()
        42
    """

    def __init__(self, finish: Callable[[], Any]):
        self._finish: Callable[[], Any] | None = finish
        self._lock = threading.Lock()
        self._result: Any = None
        self._error: BaseException | None = None

    @property
    def is_done(self) -> bool:
        """Whether somebody has waited for it, without an error."""
        return self._finish is None and self._error is None

    def wait(self) -> Any:
        """Block until the operation is done; return its result, or raise its error. Later calls do the same."""
        with self._lock:
            if self._finish is not None:
                try:
                    self._result = self._finish()
                except Exception as error:
                    self._error = error
                self._finish = None  # frees buffers and works
        if self._error is not None:
            raise self._error
        return self._result
