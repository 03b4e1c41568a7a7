"""What stands in for `Interruption` where a test has no signals."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from thinwire.comm import Communicator


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
