"""Communication beside the training: a call that runs in a background thread, on the work stream."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from ..comm import Background
from ..streams import WorkStream

T = TypeVar("T")


class Flight(Generic[T]):
    """A call in flight.

    Args:
        call: what to run. On a GPU its work is queued on the work stream, and it blocks the thread, not the stream.
        work: the stream.
        background: the thread; it runs one flight at a time, in order.

    Example:
        >>> import torch
        >>> work, background = WorkStream(torch.device("cpu")), Background("rounds")
        >>> first, second = (Flight(lambda n=n: n, work, background) for n in (1, 2))
        >>> second.wait(), first.wait()
        (2, 1)
    """

    def __init__(self, call: Callable[[], T], work: WorkStream, background: Background):
        self._call, self._work = call, work
        self._outcome: Future[T] = Future()
        self._handle = background.submit(self._run)

    def settle(self) -> T:
        """As `wait`, for callers that only need a free communicator; the training does not continue from here."""
        try:
            return self._outcome.result()  # not through the handle, whose waits the planner traces
        finally:
            self._work.join()

    def wait(self) -> T:
        """Block until the call has ended, as far as the host sees, and return its result. Raises its error, if it had one."""
        try:
            result: T = self._handle.wait()
        finally:
            self._work.join()
        return result

    def _run(self) -> T:
        try:
            with self._work.continued():
                self._outcome.set_result(self._call())
        except BaseException as error:
            self._outcome.set_exception(error)
            raise
        return self._outcome.result()
