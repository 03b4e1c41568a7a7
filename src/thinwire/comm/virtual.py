"""A clock for a network that is not there.

Each worker notes what it sends, waits for and computes (`thinwire.network.Trace`). To read the clock, rank 0 gathers the
traces and plays them on a model of the network (`Replay`). What workers send does not depend on when it arrives. So this
gives the times that the network would have given, and the real network and the order of threads have no part in them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..algorithm import require
from ..network import Messages, Network, Replay, Trace
from . import check

if TYPE_CHECKING:
    from .base import Communicator


class VirtualClock:
    """The clock of one worker.

    Args:
        network: between the workers.
        side: connects the workers for reading the clock. It is not traced.
        measures: whether processor time counts as computation; if not, only what `Communicator.compute` declares.
        start_seconds: what it shows at first.

    Raises:
        ValueError: the network has another number of workers.
    """

    def __init__(self, network: Network, side: Communicator, measures: bool = True, start_seconds: float = 0.0):
        require(
            network.workers == side.size,
            f"a network of {network.workers} workers cannot serve {side.size}; give it as many",
        )
        self.trace = Trace(measures)
        self._side, self._start = side, start_seconds
        self._replay = Replay(network) if side.rank == 0 else None

    def seconds(self) -> float:
        """See `Communicator.virtual_seconds`."""
        self.trace.charge()
        traces = self._side.gather_objects(self.trace.take())
        answer: float | str = 0.0
        if self._replay is not None:
            try:
                answer = self._start + self._replay.play(traces)
            except ValueError as error:
                answer = str(error)
        answer = self._side.gather_objects(answer)[0]
        self.trace.skip()
        require(not isinstance(answer, str), f"the virtual clock stopped: {answer}")
        return float(answer)


def messages_of(sends: dict[int, Tensor], receives: dict[int, Tensor]) -> Messages:
    """The messages of an exchange; nothing empty is sent."""
    sides = [
        tuple((peer, num_bytes) for peer, t in side.items() if (num_bytes := check.num_bytes(t)))
        for side in (sends, receives)
    ]
    return Messages(sides[0], sides[1])


def traced(wait: Callable[[], Any], trace: Trace, number: int) -> Any:
    """Wait for an operation, and note that."""
    trace.charge()
    result = wait()
    trace.skip()
    trace.wait(number)
    return result
