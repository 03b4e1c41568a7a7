"""A discrete-event model of one training step: workers run recorded programs on a network of FIFO lines.

    compute thread   forward; then for each bucket its part of backward, `step` (encode, issue), and one more stage of
                     each earlier bucket whose exchange has several: wait for an operation, decode, encode, issue
    finish thread    for each bucket in order the stages that are left, those of later buckets in turn, and `wait`: wait
                     for the last operation, decode. On averagers that send at once it begins when all buckets are sent,
                     as the library does on CPUs
    lines            one line out and one in for each worker inside its node, and for each node between nodes. A line
                     serves messages in the order of arrival, for bytes/rate seconds each. A sender hands over its
                     next message when the line has taken the last. A message arrives one latency after it leaves.

Nodes are alike: node 0 stands for all, and a message that leaves it for node +d comes back in as one from node -d. So
time does not grow with the square of the number of nodes. `fold=False` simulates every worker, to check that.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from ..algorithm import require
from .network import Link, Network
from .record import Action, Messages, Program, Ring
from .sized import Work

EVENTS = 64
"""Steps in which a longer ring is simulated, and groups in which the messages of a larger operation leave a node."""


@dataclass(frozen=True)
class Bucket:
    """One call of `step`: seconds of backward before it, and the programs of the first `len(programs)` ranks."""

    backward_seconds: float
    programs: Sequence[Program]


Seconds = Callable[[Work], float]


def simulate(
    network: Network, buckets: Sequence[Bucket], forward_seconds: float, work_seconds: Seconds, fold: bool = True
) -> float:
    """Seconds until every worker has its result.

    Args:
        network: the links.
        buckets: in the order of backward; each with a program for every rank of node 0, or, unfolded, for all ranks.
        forward_seconds: computation before backward.
        work_seconds: how long a piece of encoding or decoding takes.
        fold: whether node 0 stands for all nodes. Right where nodes are symmetric: rank r of one node does what rank r
            of another does, with peers as far away.

    Raises:
        ValueError: a program waits for a message that nobody sends.

    Example:
        >>> from thinwire.plan import Link, Network
        >>> simulate(Network(2), [], 0.25, lambda work: 0.0)
        0.25
    """
    return _Engine(network, fold).run(buckets, forward_seconds, work_seconds)


@dataclass
class _Operation:
    """An operation under way at one worker: ends when nothing is left to be sent or received."""

    left: int
    end: float = 0.0
    waiting: list[Callable[[], None]] = field(default_factory=list)

    def finish_part(self, now: float, engine: _Engine) -> None:
        self.left -= 1
        self.end = max(self.end, now)
        if self.left == 0:
            engine.at(self.end, self._wake)

    def _wake(self) -> None:
        waiting, self.waiting = self.waiting, []
        for wake in waiting:
            wake()


@dataclass
class _RingState:
    """One worker's part of one ring: the operation, its link to the next worker, and how many pieces came."""

    operation: _Operation | None = None
    arrived: int = 0
    sent: int = 0


@dataclass
class _Line:
    free: float = 0.0


class _Engine:
    """The clock, the lines and what is under way."""

    def __init__(self, network: Network, fold: bool):
        self.network = network
        self.workers = network.workers_per_node if fold else network.workers
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._lines: defaultdict[tuple[str, int], _Line] = defaultdict(_Line)
        self._arrived: defaultdict[tuple[int, int, int], list[float]] = defaultdict(list)
        self._expected: defaultdict[tuple[int, int, int], list[_Operation]] = defaultdict(list)
        self._rings: defaultdict[tuple[int, int], _RingState] = defaultdict(_RingState)
        self._num_rings = [0] * self.workers

    def at(self, time: float, act: Callable[[], None]) -> None:
        """Have `act` run at `time`; those of one time in the order of the calls."""
        self._number += 1
        heapq.heappush(self._events, (time, self._number, act))

    def run(self, buckets: Sequence[Bucket], forward_seconds: float, work_seconds: Seconds) -> float:
        threads = []
        for rank in range(self.workers):
            worker = _Worker(self, rank, buckets, forward_seconds, work_seconds)
            threads += [_Thread(self, worker.compute()), _Thread(self, worker.finish())]
        for thread in threads:
            self.at(0.0, thread.advance)
        while self._events:
            self.now, _, act = heapq.heappop(self._events)
            act()
        require(all(t.is_done for t in threads), "a worker waits for a message that nobody sends; is the fold wrong?")
        return max(t.end for t in threads)

    # ---- operations ----

    def issue(self, rank: int, action: Messages | Ring) -> _Operation:
        """Start an operation of worker `rank` now."""
        if isinstance(action, Ring):
            return self._issue_ring(rank, action)
        operation = _Operation(len(action.sends) + len(action.receives))
        for source, _ in action.receives:
            self._expect(self._key(source, rank), operation)
        self._send_next(rank, iter(self._groups(rank, action.sends)), operation)
        if operation.left == 0:
            operation.end = self.now
        return operation

    def _groups(self, rank: int, sends: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
        """The messages one by one; where one line takes many, several together."""
        size = 1 if self.workers == self.network.workers else -(-len(sends) // EVENTS)
        of_node = rank // self.network.workers_per_node
        for leaves, run in groupby(sends, lambda send: send[0] // self.network.workers_per_node != of_node):
            messages = list(run)
            step = size if leaves else 1
            yield from (messages[i : i + step] for i in range(0, len(messages), step))

    def _send_next(self, rank: int, groups: Iterator[list[tuple[int, int]]], operation: _Operation) -> None:
        group = next(groups, None)
        if group is None:
            return
        keys = [self._key(rank, peer) for peer, _ in group]

        def left() -> None:
            for _ in keys:
                operation.finish_part(self.now, self)
            self._send_next(rank, groups, operation)

        def arrived(end: float) -> None:
            for key in keys:
                self._arrive(key, end)

        self.at(self._transmit(rank, group[0][0], sum(num_bytes for _, num_bytes in group), 1, arrived), left)

    def _transmit(self, rank: int, peer: int, num_bytes: float, hops: float, arrived: Callable[[float], None]) -> float:
        """Put a message on the lines now; returns when it has left. `arrived` gets the time at which all of it came."""
        link, out, into = self._path(rank, peer)
        service = num_bytes / link.bytes_per_second
        start = max(self.now, out.free)
        out.free = start + service

        def begin_to_arrive() -> None:
            into.free = max(self.now, into.free) + service
            arrived(into.free)

        self.at(start + hops * link.latency_seconds, begin_to_arrive)
        return out.free

    def _arrive(self, key: tuple[int, int, int], end: float) -> None:
        if self._expected[key]:
            self._expected[key].pop(0).finish_part(end, self)
        else:
            self._arrived[key].append(end)

    def _expect(self, key: tuple[int, int, int], operation: _Operation) -> None:
        if self._arrived[key]:
            operation.finish_part(max(self.now, self._arrived[key].pop(0)), self)
        else:
            self._expected[key].append(operation)

    # ---- rings: 2(W-1) steps; in each, a worker sends a piece to the next, when the piece before has come ----

    def _issue_ring(self, rank: int, action: Ring) -> _Operation:
        size = self.network.workers
        number = self._num_rings[rank]
        self._num_rings[rank] += 1
        steps = 2 * (size - 1)
        events = min(steps, EVENTS)
        operation = _Operation(events)
        if events == 0 or action.num_bytes == 0:
            operation.left, operation.end = 0, self.now
            return operation
        state = self._rings[rank, number]
        state.operation = operation
        piece, hops = steps / events * action.num_bytes / size, steps / events
        self._advance_ring(rank, number, piece, hops)
        for _ in range(state.arrived):
            operation.finish_part(self.now, self)
        return operation

    def _advance_ring(self, rank: int, number: int, piece: float, hops: float) -> None:
        state, target = self._rings[rank, number], (rank + 1) % self.workers
        events = min(2 * (self.network.workers - 1), EVENTS)

        def arrived() -> None:
            self._rings[target, number].arrived += 1
            operation = self._rings[target, number].operation
            if operation is not None:
                operation.finish_part(self.now, self)
            self._advance_ring(target, number, piece, hops)

        while state.operation is not None and state.sent <= state.arrived and state.sent < events:
            state.sent += 1
            self._transmit(rank, rank + 1, piece, hops, lambda end: self.at(end, arrived))

    # ---- the fold ----

    def _key(self, source: int, target: int) -> tuple[int, int, int]:
        """What a message is matched by: both ends, as ranks of node 0, and how many nodes lie between them."""
        per_node, nodes = self.network.workers_per_node, self.network.nodes
        if self.workers == self.network.workers:
            return (source, 0, target)
        return (source % per_node, (target // per_node - source // per_node) % nodes, target % per_node)

    def _path(self, rank: int, peer: int) -> tuple[Link, _Line, _Line]:
        """The link from a worker to a peer, with the sender's line and the receiver's."""
        per_node, peer = self.network.workers_per_node, peer % self.network.workers
        node, other = rank // per_node, peer // per_node
        if node == other:
            return self.network.inner, self._lines["inner out", rank], self._lines["inner in", peer]
        if self.workers != self.network.workers:
            other = 0
        return self.network.outer, self._lines["outer out", node], self._lines["outer in", other]


class _Thread:
    """Runs a generator that yields seconds of work, or operations and events to wait for."""

    def __init__(self, engine: _Engine, steps: Iterator[float | _Operation]):
        self._engine, self._steps = engine, steps
        self.is_done, self.end = False, 0.0

    def advance(self) -> None:
        for step in self._steps:
            if isinstance(step, _Operation):
                if step.left or step.end > self._engine.now:
                    step.waiting.append(self.advance)
                    return
            elif step > 0:
                self._engine.at(self._engine.now + step, self.advance)
                return
        self.is_done, self.end = True, self._engine.now


class _Worker:
    """The two threads of one worker."""

    def __init__(
        self,
        engine: _Engine,
        rank: int,
        buckets: Sequence[Bucket],
        forward_seconds: float,
        work_seconds: Seconds,
    ):
        self._engine, self._rank = engine, rank
        self._forward_seconds, self._work_seconds = forward_seconds, work_seconds
        self._buckets = [(bucket.backward_seconds, bucket.programs[rank]) for bucket in buckets]
        self._operations: list[list[_Operation]] = [[] for _ in buckets]
        self._stepped = [_Operation(1) for _ in buckets]
        self._stages = [iter(program.stages) for _, program in self._buckets]

    def compute(self) -> Iterator[float | _Operation]:
        """Forward, then each bucket's part of backward, its `step`, and the next stage of those before."""
        yield self._forward_seconds
        for number, (backward_seconds, program) in enumerate(self._buckets):
            yield backward_seconds
            yield from self._perform(program.step, number)
            for earlier in range(number):
                yield from self._advance(earlier)
            self._stepped[number].finish_part(self._engine.now, self._engine)

    def finish(self) -> Iterator[float | _Operation]:
        """The stages that are left of each bucket, and its `wait`."""
        for number, (_, program) in enumerate(self._buckets):
            yield self._stepped[-1 if program.sends_at_once else number]
            for _ in program.stages:
                for under_way in range(number, len(self._buckets)):
                    yield from self._advance(under_way)
            yield from self._perform(program.wait, number)

    def _advance(self, number: int) -> Iterator[float | _Operation]:
        """The next stage of a bucket, if one is left."""
        yield from self._perform(next(self._stages[number], ()), number)

    def _perform(self, actions: Sequence[Action], number: int) -> Iterator[float | _Operation]:
        operations = self._operations[number]
        for action in actions:
            if isinstance(action, Work):
                yield self._work_seconds(action)
            elif isinstance(action, Messages | Ring):
                operations.append(self._engine.issue(self._rank, action))
            else:
                yield operations[action.operation]
