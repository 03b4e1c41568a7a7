"""A communicator that traces another one, to tell how long its operations would take on a modelled network.

Each worker notes what it sends, waits for and computes (`trace.py`). To read the clock, rank 0 gathers the traces and plays
them on a model of the network (`replay.py`). What workers send does not depend on when it arrives. So the result is the time
that the network would have given; the real network and the order of threads have no part in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from ..algorithm import require
from ..comm import Communicator, Handle, LocalWorld
from ..comm.background import Background
from ..comm.base import Start
from ..comm.channel import Channel
from ..comm.local_world import LocalCommunicator
from ..comm.sums import Route
from .network import Network
from .operations import Moves, PeerMessages, all_reduce, broadcast, gather_of_sizes
from .replay import Replay
from .trace import Trace


class TracedCommunicator(Communicator):
    """Hands all operations to another communicator, and traces them from `start` on.

    Args:
        comm: carries the operations; the ledger is its own.
        network: the modelled network between the workers.
        measures: whether processor time counts as computation; if not, only what `compute` declares.

    Raises:
        ValueError: the network has another number of workers, or workers may come and go.
    """

    def __init__(self, comm: Communicator, network: Network, measures: bool = True):
        super().__init__(comm.rank, comm.size)
        require(
            network.workers == comm.size,
            f"a network of {network.workers} workers cannot serve {comm.size}; give it as many",
        )
        require(not comm.is_elastic, "a modelled network has a fixed number of workers; leave elastic rounds out")
        self.ledger, self.global_ranks, self.device = comm.ledger, comm.global_ranks, comm.device
        self._comm, self._network, self._measures = comm, network, measures
        self.route = Route(comm.rank, [rank // network.workers_per_node for rank in range(comm.size)])
        self._side: Communicator = comm
        self._begun_at = 0.0
        self._replay: Replay | None = None
        self.trace: Trace | None = None

    def start(self, side: Communicator, seconds: float = 0.0) -> None:
        """Start the clock.

        Args:
            side: connects the same workers for reading the clock. It is not traced.
            seconds: what the clock shows at first.
        """
        self.trace, self._side, self._begun_at = Trace(self._measures), side, seconds
        self._replay = Replay(self._network) if side.rank == 0 else None

    def compute(self, seconds: float) -> None:
        """Count so many seconds of computation of the calling thread, beside what is measured."""
        if self.trace is not None:
            self.trace.compute(seconds)

    def virtual_seconds(self) -> float:
        """Seconds of all workers so far on the modelled network. Blocks.

        All workers call it, from their first threads, with nothing under way in other threads. They go on from the
        slowest one's time.

        Raises:
            ValueError: a worker waits for a message that nobody sends.
        """
        assert self.trace is not None, "start the clock first"
        self.trace.charge()
        traces = self._side.gather_objects(self.trace.take())
        answer: float | str = 0.0
        if self._replay is not None:
            try:
                answer = self._begun_at + self._replay.play(traces)
            except ValueError as error:
                answer = str(error)
        # The error of rank 0 goes to all, so that they stop together.
        answer = self._side.gather_objects(answer)[0]
        self.trace.skip()
        require(not isinstance(answer, str), f"the virtual clock stopped: {answer}")
        return float(answer)

    def background(self, name: str) -> Background:
        """As that of a communicator; what waits for one of its calls is traced too."""
        return _TracedBackground(self, name)

    def _close(self) -> None:
        self._comm.close()

    def _issue(self, tensors: list[Tensor], start: Start) -> Callable[[], Any]:
        return start()

    def _traced(self, moves: Moves, tensors: list[Tensor], start: Start) -> Callable[[], Any]:
        """Note an operation, and let the other communicator issue it."""
        trace = self.trace
        if trace is None:
            return self._comm._issue(tensors, start)
        number = trace.issue(moves)
        wait = self._comm._issue(tensors, start)
        trace.skip()
        return partial(_wait_traced, wait, trace, number)

    def _start_all_reduce(self, tensor: Tensor) -> Callable[[], Any]:
        start = partial(self._comm._start_all_reduce, tensor)
        return self._traced(all_reduce(self.route, tensor.nbytes), [tensor], start)

    def _start_all_gather(self, gathered: list[Tensor]) -> Callable[[], Any]:
        receives = self._others(gathered)
        moves = _messages(dict.fromkeys(receives, gathered[self.rank]), receives)
        return self._traced(moves, gathered, partial(self._comm._start_all_gather, gathered))

    def _start_gather_variable(self, tensor: Tensor, result: list[Tensor], limit: int) -> Callable[[], Any]:
        moves = gather_of_sizes(list(self._others([tensor] * self.size)), tensor.nbytes)
        start = partial(self._comm._start_gather_variable, tensor, result, limit)
        return self._traced(moves, [tensor], start)

    def _start_exchange(self, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> Callable[[], Any]:
        start = partial(self._comm._start_exchange, sends, receives)
        return self._traced(_messages(sends, receives), [*sends.values(), *receives.values()], start)

    def _start_broadcast(self, tensor: Tensor, root: int) -> Callable[[], Any]:
        moves = broadcast(self.size, self.rank, root, tensor.nbytes)
        return self._traced(moves, [tensor], partial(self._comm._start_broadcast, tensor, root))

    def _open_channel(self, peers: list[int], max_bytes: int) -> Channel:
        raise ValueError(f"rank {self.rank}: messages in no common order have no virtual seconds")


class _TracedBackground(Background):
    """A call begins when it is submitted and those before it have ended; threads that wait for it go on when it has ended."""

    def __init__(self, comm: TracedCommunicator, name: str):
        super().__init__(name)
        self._comm = comm

    def submit(self, call: Callable[[], Any]) -> Handle:
        trace = self._comm.trace
        if trace is None:
            return super().submit(call)
        handle = super().submit(partial(_run_traced, call, trace, trace.mark()))
        return Handle(partial(_join_traced, handle, trace))


def _run_traced(call: Callable[[], Any], trace: Trace, begun: int) -> tuple[Any, int]:
    trace.wait(begun)
    return call(), trace.mark()


def _join_traced(handle: Handle, trace: Trace) -> Any:
    result, ended = handle.wait()
    trace.wait(ended)
    return result


def _wait_traced(wait: Callable[[], Any], trace: Trace, number: int) -> Any:
    trace.charge()
    result = wait()
    trace.skip()
    trace.wait(number)
    return result


def _messages(sends: dict[int, Tensor], receives: dict[int, Tensor]) -> Moves:
    """The messages of an exchange; nothing empty is sent."""
    sides = [tuple((peer, t.nbytes) for peer, t in side.items() if t.nbytes) for side in (sends, receives)]
    return (PeerMessages(sides[0], sides[1]),)


@dataclass(frozen=True)
class SimulatedWorld:
    """A `LocalWorld` whose communicators are traced for a modelled network: they have `virtual_seconds` and `compute`.

    Args:
        network: the modelled network, with as many workers as the world gets.
        measures: whether the processor time of each thread counts as computation. If not, only what
            `comm.compute(seconds)` declares counts, and two runs take the same virtual seconds.
        timeout_seconds: how long a worker waits for a message before it gives up.

    Example:
        A ring all-reduce of 4 MB on a link of 1 MB/s sends 4 MB in each direction, after half a second of computation:

        >>> import torch
        >>> from thinwire.plan import Link, Network
        >>> def seconds(comm):
        ...     comm.compute(0.5)
        ...     comm.all_reduce(torch.ones(1_000_000)).wait()
        ...     return comm.virtual_seconds()
        >>> SimulatedWorld(Network(2, outer=Link(1e6)), measures=False).run(seconds)
        [4.5, 4.5]
    """

    network: Network
    measures: bool = True
    timeout_seconds: float = 60.0

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `fn(comm, *args)` in every worker and return the results in rank order; see `LocalWorld.run`."""
        return LocalWorld(self.network.workers, self.timeout_seconds).run(self._work, fn, args)

    def _work(self, comm: LocalCommunicator, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        traced = TracedCommunicator(comm, self.network, self.measures)
        traced.start(comm.reordered(range(comm.size)))  # so that reading the clock mixes with no traced message
        return fn(traced, *args)
