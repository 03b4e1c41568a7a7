"""A discrete-event model of a network of FIFO lines.

    threads    generators that yield seconds of work, or operations to wait for; each has a core of its own, or the
               threads of a node share its cores
    lines      one line out and one in for each worker inside its node, and for each node between nodes. A line serves
               messages in the order of arrival, for bytes/rate seconds each, and `message_seconds` more. A sender hands
               over its next message when the line has taken the last. A message arrives one latency after it leaves.

Folded, node 0 stands for all nodes, which must be alike: a message that leaves it for node +d comes back in as one from
node -d. So time does not grow with the square of the number of nodes. Unfolded, every worker is simulated.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

from .cores import Cores
from .network import Link, Network
from .operations import Moves, PeerMessages

EVENTS = 64
"""Groups in which the messages of a larger operation leave a node."""


@dataclass
class Operation:
    """An operation under way at one worker: ends when nothing is left to be sent or received."""

    left: int
    end: float = 0.0
    waiting: list[Callable[[], None]] = field(default_factory=list)

    def is_under_way(self, now: float) -> bool:
        """Whether it ends later than `now`."""
        return self.left > 0 or self.end > now

    def finish_part(self, now: float, engine: Engine, parts: int = 1) -> None:
        """One part of it, or several, end at `now`, which may lie ahead; wakes those who wait after the last."""
        self.left -= parts
        if now > self.end:
            self.end = now
        if self.left == 0:
            engine.at(self.end, self._wake)

    def _wake(self) -> None:
        waiting, self.waiting = self.waiting, []
        for wake in waiting:
            wake()


_Slot = tuple[tuple[int, ...], int]
"""A channel, and the number of a message in it."""
_Message = tuple[int, float, _Slot]
"""A peer, bytes, and where they come."""


@dataclass
class _Line:
    """A FIFO line with a token bucket."""

    free: float = 0.0
    """When it has paid for all that it took; ahead of what has left by the burst at most."""

    def take(self, now: float, service: float, burst: float) -> tuple[float, float]:
        """Take a message of `service` seconds at `now`; returns when it begins to leave and when it has left."""
        before = max(now, self.free)
        self.free = before + service
        return max(now, before - burst), max(now, self.free - burst)


class Engine:
    """The clock, the lines and what is under way.

    Args:
        network: the links.
        fold: whether node 0 stands for all nodes.
    """

    def __init__(self, network: Network, fold: bool):
        self.network = network
        self.workers = network.workers_per_node if fold else network.workers
        self.now = 0.0
        """Seconds since the start."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._lines: defaultdict[tuple[str, int], _Line] = defaultdict(_Line)
        # When a message came that nobody waited for yet, or who waits for it. Both sides number them in the order of the calls.
        self._slots: dict[_Slot, float | Operation] = {}
        self._sent: defaultdict[tuple[int, ...], int] = defaultdict(int)
        self._received: defaultdict[tuple[int, ...], int] = defaultdict(int)
        self._cores = [Cores(self, network.cores) for _ in range(self.workers // network.workers_per_node)]

    def at(self, time: float, act: Callable[[], None]) -> None:
        """Have `act` run at `time`; those of one time in the order of the calls."""
        # The number orders events of one time by their calls, and spares heapq from comparing functions.
        self._number += 1
        heapq.heappush(self._events, (time, self._number, act))

    def run(self, is_done: Callable[[], bool] = lambda: False) -> None:
        """Process events in the order of time, until none is left or `is_done`."""
        while self._events and not is_done():
            self.now, _, act = heapq.heappop(self._events)
            act()

    def work(self, rank: int, seconds: float, done: Callable[[], None]) -> None:
        """A thread of worker `rank` computes for `seconds`, on a core of its own; `done` runs at the end."""
        self._cores[rank // self.network.workers_per_node].work(seconds, done)

    # ---- operations ----

    def issue(self, rank: int, steps: Moves) -> Operation:
        """Start an operation of worker `rank` now."""
        num_sends, num_receives = (
            sum(map(len, side)) for side in zip(*((s.sends, s.receives) for s in steps), strict=True)
        )
        operation = Operation(num_sends + num_receives, end=self.now)
        parts = []
        for number, step in enumerate(steps, 1):
            sends = [(peer, n, self._next_slot(self._sent, rank, peer)) for peer, n in step.sends]
            # The next step waits for what comes in this one; after the last, whoever waits for the operation does.
            received = operation if number == len(steps) else Operation(len(step.receives))
            for source, _ in step.receives:
                self._expect(self._next_slot(self._received, source, rank), received)
            parts.append((self._groups(rank, sends), received, len(step.receives)))
        if operation.left:
            self._after_start(rank, steps, partial(self._send_parts, rank, parts, operation))
        return operation

    def _send_parts(
        self, rank: int, parts: list[tuple[Iterator[list[_Message]], Operation, int]], operation: Operation
    ) -> None:
        """Send the first part, and once it has received all of it, the next."""
        (groups, received, num_receives), *others = parts
        self._send_next(rank, groups, operation)

        def go_on() -> None:
            if received.is_under_way(self.now):
                received.waiting.append(go_on)
            else:
                operation.finish_part(self.now, self, num_receives)
                self._send_parts(rank, others, operation)

        if others:
            go_on()

    def _after_start(self, rank: int, steps: Sequence[PeerMessages], send: Callable[[], None]) -> None:
        """Have an operation begin to send once the worker has started it."""
        node, per_node = rank // self.network.workers_per_node, self.network.workers_per_node
        inside = self.network.nodes == 1 or all(peer // per_node == node for step in steps for peer, _ in step.sends)
        seconds = (self.network.inner if inside else self.network.outer).operation_seconds
        if seconds:
            self.at(self.now + seconds, send)
        else:
            send()

    def _groups(self, rank: int, sends: Sequence[_Message]) -> Iterator[list[_Message]]:
        """The messages one by one; where one line takes many, several together."""
        # A group takes the path to its first peer, and only a folded network has one path to all other nodes.
        size = -(-len(sends) // EVENTS) if self._is_folded else 1
        of_node = rank // self.network.workers_per_node
        for leaves, run in groupby(sends, lambda send: send[0] // self.network.workers_per_node != of_node):
            messages = list(run)
            step = size if leaves else 1
            yield from (messages[i : i + step] for i in range(0, len(messages), step))

    def _send_next(self, rank: int, groups: Iterator[list[_Message]], operation: Operation) -> None:
        group = next(groups, None)
        if group is None:
            return

        def left() -> None:
            operation.finish_part(self.now, self, len(group))
            self._send_next(rank, groups, operation)

        num_bytes, slots = sum(n for _, n, _ in group), [slot for _, _, slot in group]
        self.at(self._transmit(rank, group[0][0], num_bytes, slots), left)

    def _transmit(self, rank: int, peer: int, num_bytes: float, slots: Sequence[_Slot]) -> float:
        """Put a message for each slot on the lines now, as one; returns when they have left. They come at once."""
        link, out, into = self._path(rank, peer)
        leaving, coming = self._rates(link, rank, peer)
        extra = len(slots) * link.message_seconds
        begin, end = out.take(self.now, num_bytes / leaving + extra, link.burst_bytes / leaving)
        taken = num_bytes / coming + extra, link.burst_bytes / coming
        # The receiver's line serves in the order of arrival, so it is taken only when the message gets there.
        self.at(begin + link.latency_seconds, lambda: self._arrive(slots, into.take(self.now, *taken)[1]))
        return end

    def _arrive(self, slots: Sequence[_Slot], end: float) -> None:
        """What came to these slots ends the operations that wait there, at `end`, or waits for one."""
        for slot in slots:
            waiting = self._slots.pop(slot, None)
            if isinstance(waiting, Operation):
                waiting.finish_part(end, self)
            else:
                self._slots[slot] = end

    def _rates(self, link: Link, rank: int, peer: int) -> tuple[float, float]:
        """Bytes per second out of the worker and into the peer."""
        uplinks, per_node = self.network.uplinks, self.network.workers_per_node
        if not uplinks or link is not self.network.outer:
            return link.bytes_per_second, link.bytes_per_second
        return uplinks[rank // per_node], uplinks[peer % self.network.workers // per_node]

    def _expect(self, slot: _Slot, operation: Operation) -> None:
        came = self._slots.pop(slot, None)
        if isinstance(came, float):
            operation.finish_part(max(self.now, came), self)
        else:
            self._slots[slot] = operation

    # ---- the fold ----

    @property
    def _is_folded(self) -> bool:
        return self.workers < self.network.workers

    def _next_slot(self, numbers: defaultdict[tuple[int, ...], int], source: int, target: int) -> _Slot:
        """Of the next message from one worker to another; folded, pairs of workers as far apart share a channel."""
        channel: tuple[int, ...] = (0, source, target)
        if self._is_folded:
            (node, one), (other, two) = (divmod(rank, self.network.workers_per_node) for rank in (source, target))
            channel = (one, (other - node) % self.network.nodes, two)
        numbers[channel] += 1
        return channel, numbers[channel]

    def _path(self, rank: int, peer: int) -> tuple[Link, _Line, _Line]:
        """The link from a worker to a peer, with the sender's line and the receiver's."""
        per_node, peer = self.network.workers_per_node, peer % self.network.workers
        node, other = rank // per_node, peer // per_node
        if node == other:
            return self.network.inner, self._lines["inner out", rank], self._lines["inner in", peer]
        if self._is_folded:
            other = 0
        return self.network.outer, self._lines["outer out", node], self._lines["outer in", other]


class Thread:
    """A thread of worker `rank`: a generator that yields seconds of work, operations to wait for, or None to pause."""

    def __init__(self, engine: Engine, rank: int, steps: Iterator[float | Operation | None]):
        self._engine, self._rank, self._steps = engine, rank, steps
        self.is_idle, self.end = False, 0.0
        engine.at(engine.now, self._advance)

    def resume(self) -> None:
        """Go on after a pause."""
        if self.is_idle:
            self.is_idle = False
            self._engine.at(self._engine.now, self._advance)

    def _advance(self) -> None:
        for step in self._steps:
            if step is None:
                break
            if isinstance(step, Operation):
                if step.is_under_way(self._engine.now):
                    step.waiting.append(self._advance)
                    return
            elif step > 0:
                self._engine.work(self._rank, step, self._advance)
                return
        self.is_idle, self.end = True, self._engine.now
