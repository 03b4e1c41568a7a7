"""Plays the traces of all workers on a network, piece by piece."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from ..algorithm import require
from .engine import Engine, Operation, Thread
from .network import Network
from .operations import PeerMessages
from .trace import Entry


class Replay:
    """The clock of W workers whose traces come a piece at a time.

    Args:
        network: has W workers.

    Example:
        >>> from thinwire.plan import Link
        >>> def work(peer):
        ...     return [[0, [["work", 0.5], ["messages", 0, [[[peer, 1000]], [[peer, 1000]]]], ["wait", 0]]]]
        >>> Replay(Network(2, outer=Link(bytes_per_second=1000.0))).play([work(1), work(0)])
        1.5
    """

    def __init__(self, network: Network):
        self._engine = Engine(network, fold=False)
        self._queues: dict[tuple[int, int], deque[Entry]] = {}
        self._threads: dict[tuple[int, int], Thread] = {}
        self._gates: dict[tuple[int, int], Operation] = {}  # (rank, number) => ends with that operation or mark
        self._first = [self._open((rank, 0)) for rank in range(network.workers)]

    def play(self, traces: Sequence[list[list[Any]]]) -> float:
        """Play on until the first thread of every worker has done all of its trace; returns the seconds since the start.

        All workers go on from this time, as after a barrier. Operations that nobody has waited for stay under way.

        Args:
            traces: what each worker's `Trace.take` returned, in the order of ranks. Threads that the first one does not
                wait for must have ended, or wait for what follows.

        Raises:
            ValueError: a worker waits for a message that nobody sends.
        """
        for rank, trace in enumerate(traces):
            for number, entries in trace:
                self._extend(rank, number, entries)
        self._engine.run(lambda: all(thread.is_idle for thread in self._first))
        require(all(t.is_idle for t in self._first), "a worker waits for a message that nobody sends")
        now = self._engine.now
        # A training plays pieces without end; ended gates would pile up.
        self._gates = {key: gate for key, gate in self._gates.items() if gate.is_under_way(now)}
        return now

    def _extend(self, rank: int, number: int, entries: list[Entry]) -> None:
        key = (rank, number)
        for kind, *rest in entries:
            if kind not in ("work", "wait"):
                # Made before the engine runs, because another thread may wait for it before it begins.
                self._gates[rank, rest[0]] = Operation(1)
        thread = self._threads.get(key) or self._open(key)
        self._queues[key].extend(entries)
        thread.resume()

    def _open(self, key: tuple[int, int]) -> Thread:
        self._queues[key] = deque()
        self._threads[key] = Thread(self._engine, key[0], self._steps(key[0], self._queues[key]))
        return self._threads[key]

    def _steps(self, rank: int, queue: deque[Entry]) -> Iterator[float | Operation | None]:
        while True:
            while not queue:
                yield None
            kind, value, *rest = queue.popleft()
            if kind == "work":
                yield value
            elif kind != "wait":
                self._begin(rank, kind, self._gates[rank, value], rest)
            elif (rank, value) in self._gates:  # others ended before the last piece
                yield self._gates[rank, value]

    def _begin(self, rank: int, kind: str, gate: Operation, steps: list[Any]) -> None:
        """Start an operation, or pass a mark; `gate` ends with it."""
        end = partial(self._end, gate)
        if kind == "mark":
            return end()
        operation = self._engine.issue(rank, tuple(PeerMessages(*step) for step in steps))
        if operation.is_under_way(self._engine.now):
            operation.waiting.append(end)
        else:
            end()

    def _end(self, gate: Operation) -> None:
        gate.finish_part(self._engine.now, self._engine)
