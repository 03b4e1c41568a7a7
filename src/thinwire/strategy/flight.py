"""Communication beside the training: a call that runs in a thread of its own, after the flight before it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from ..streams import WorkStream

T = TypeVar("T")


class Flight(Generic[T]):
    """A call in flight, and the thread that runs it. Flights with an `after` run one at a time, in order.

    The thread is a daemon, so that a process can exit while its neighbours are silent.

    Args:
        call: what to run. On a GPU its work is queued on the work stream, and it blocks the thread, not the stream.
        work: the stream.
        after: the flight that must end first.

    Example:
        >>> import torch
        >>> work = WorkStream(torch.device("cpu"))
        >>> first = Flight(lambda: 1, work)
        >>> Flight(lambda: 2, work, after=first).wait()
        2
    """

    def __init__(self, call: Callable[[], T], work: WorkStream, after: Flight[T] | None = None):
        self._call, self._work, self._after = call, work, after
        self._error: BaseException | None = None
        self._result: list[T] = []
        self._thread = threading.Thread(target=self._run, name="thinwire-round", daemon=True)
        self._thread.start()

    def wait(self) -> T:
        """Block until the call has ended, as far as the host sees, and return its result. Raises its error, if it had one."""
        self._thread.join()
        self._work.join()
        if self._error is not None:
            raise self._error
        return self._result[0]

    def _run(self) -> None:
        try:
            with self._work.continued():
                if self._after is not None:
                    self._after.wait()
                self._result.append(self._call())
        except BaseException as error:  # for `wait`
            self._error = error
        self._after = None  # no chain of all flights so far stays in memory
