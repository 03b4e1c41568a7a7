"""The processes of one elastic worker: where its model is sharded, each of them holds a shard.

    process 0    asks the Lighthouse and sends heartbeats, and tells the others of its worker what it hears
    process r    connects with process r of the other workers, averages its shard with theirs, and is healed from theirs

They take part in a round together or not at all. Where a part of it can fail on one of them alone, they tell each other
whether it did. If one of them dies, the others raise `LeftOut`, so that their launcher starts all of them again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..base import Communicator
from ..handle import CommunicationError, reason_of
from ..members import LeftOut

ERRORS: tuple[type[Exception], ...] = (ValueError, LeftOut, CommunicationError)
"""What `on_first` raises on all processes."""


class Processes:
    """The processes of a worker, this one among them.

    Args:
        number: of the worker.
        comm: connects its processes; None if this is the only one.

    Attributes:
        rank: of this process in the worker; 0 speaks for all.
        size: how many there are.

    Raises:
        ValueError: on all of them, which have different numbers.
        LeftOut: as in `gather`.
    """

    def __init__(self, number: int, comm: Communicator | None):
        self._number, self._comm = number, comm
        self.rank, self.size = (0, 1) if comm is None else (comm.rank, comm.size)
        numbers = self.gather(number)
        if len(set(numbers)) > 1:
            self.close()
            raise ValueError(
                f"ElasticCommunicator: the {self.size} processes of `replica` are one worker, and have the numbers {numbers}; "
                "give all of them the number of their worker"
            )

    def gather(self, value: Any) -> list[Any]:
        """What all processes passed in, in rank order, after a round trip through JSON.

        Raises:
            LeftOut: one of them has died, or is silent.
        """
        if self._comm is None:
            return [value]
        try:
            return self._comm.gather_objects(value)
        except CommunicationError as error:
            raise LeftOut(
                f"worker {self._number}: another of its {self.size} processes has ended or is silent, and the worker leaves "
                f"the run; end them all, and start them again together ({reason_of(error)})"
            ) from error

    def on_first(self, call: Callable[[], Any]) -> Any:
        """What `call` returns or raises on process 0, which alone calls it: plain values, or one of `ERRORS`.

        Raises:
            LeftOut: as in `gather`.
        """
        if self.size == 1:
            return call()
        value, raised = None, None
        if self.rank == 0:
            try:
                value = call()
            except ERRORS as error:
                raised = error
        # JSON carries no exceptions: an error travels as its place in `ERRORS` and its text.
        kind = next((i for i, error in enumerate(ERRORS) if isinstance(raised, error)), None)
        value, kind, text = self.gather([value, kind, str(raised)])[0]
        if kind is not None:
            raise raised or ERRORS[kind](text)
        return value

    def close(self) -> None:
        """Close the connections."""
        if self._comm is not None:
            self._comm.close()
