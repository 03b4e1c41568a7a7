"""What stands in for signals where a test has none: for `Interruption`, and for Ctrl-C in an operation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from thinwire.comm import Communicator, Handle


class Requests:
    """An interruption whose signals a function gives.

    Args:
        requested: the signal of this step, or 0; gets the communicator.
    """

    def __init__(self, requested: Callable[[Communicator], int]):
        self._requested = requested

    def requested(self, comm: Communicator, at_once: bool = False) -> int:
        return self._requested(comm)

    def waiting(self) -> AbstractContextManager[None]:
        return nullcontext()


NEVER = Requests(lambda comm: 0)


def interrupt_once(comm: Communicator, operation: str) -> None:
    """Let the wait for the next call of an operation end with Ctrl-C, once its messages have come."""
    real = getattr(comm, operation)

    def interrupted(*args: Any, **options: Any) -> Handle:
        setattr(comm, operation, real)
        handle = real(*args, **options)

        def finish() -> None:
            handle.wait()
            raise KeyboardInterrupt

        return Handle(finish)

    setattr(comm, operation, interrupted)
