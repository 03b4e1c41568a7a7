"""Communication beside the training: a call that runs in a thread of its own, after the flight before it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from ..comm import Communicator
from ..streams import WorkStream

T = TypeVar("T")


class Flight(Generic[T]):
    """A call in flight, and the thread that runs it. Flights with an `after` run one at a time, in order.

    The thread is a daemon, so that a process can exit while its neighbours are silent.

    Args:
        call: what to run. On a GPU its work is queued on the work stream, and it blocks the thread, not the stream.
        work: the stream.
        comm: the communicator that the call uses.
        after: the flight that must end first.

    Example:
        >>> import torch
        >>> from thinwire.comm import LocalWorld
        >>> def second(comm):
        ...     work = WorkStream(torch.device("cpu"))
        ...     first = Flight(lambda: 1, work, comm)
        ...     return Flight(lambda: 2, work, comm, after=first).wait()
        >>> LocalWorld(1).run(second)
        [2]
    """

    def __init__(self, call: Callable[[], T], work: WorkStream, comm: Communicator, after: Flight[T] | None = None):
        self._call, self._work, self._comm, self._after = call, work, comm, after
        self._begun = comm.mark()
        self.landed: int | None = None
        """The communicator's mark at its end, once it has ended."""
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
            self._comm.after(self._begun)
            with self._work.continued():
                if self._after is not None:
                    self._after.wait()
                    self._comm.after(self._after.landed)
                self._result.append(self._call())
            self.landed = self._comm.mark()
        except BaseException as error:  # for `wait`
            self._error = error
        self._after = None  # no chain of all flights so far stays in memory
