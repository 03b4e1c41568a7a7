"""One training step on a network: workers run recorded programs under the clock of ``engine.py``.

compute thread   forward; then for each bucket its part of backward, `step` (encode, issue), and one more stage of
                 each earlier bucket whose exchange has several: wait for an operation, decode, encode, issue
finish thread    for each bucket in order the stages that are left, those of later buckets in turn, and `wait`: wait
                 for the last operation, decode. On averagers that send at once it begins when all buckets are sent,
                 as the library does on CPUs
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..algorithm import require
from .engine import Engine, Operation, Thread
from .network import Network
from .record import Action, Program
from .sized import Work


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
    engine = Engine(network, fold)
    threads = []
    for rank in range(engine.workers):
        worker = _SimulatedWorker(engine, rank, buckets, work_seconds)
        threads += [Thread(engine, rank, worker.compute(forward_seconds)), Thread(engine, rank, worker.finish())]
    engine.run()
    # No event is left, so a thread that still waits would wait for ever.
    require(all(t.is_idle for t in threads), "a worker waits for a message that nobody sends; is the fold wrong?")
    return max(t.end for t in threads)


class _SimulatedWorker:
    """The two threads of one worker."""

    def __init__(self, engine: Engine, rank: int, buckets: Sequence[Bucket], work_seconds: Seconds):
        self._engine, self._rank, self._work_seconds = engine, rank, work_seconds
        self._buckets = [(bucket.backward_seconds, bucket.programs[rank]) for bucket in buckets]
        self._operations: list[list[Operation]] = [[] for _ in buckets]
        self._stepped = [Operation(1) for _ in buckets]
        # Both threads take from these queues, so each stage is performed once.
        self._stages = [deque(program.stages) for _, program in self._buckets]

    def compute(self, forward_seconds: float) -> Iterator[float | Operation]:
        """Forward, then each bucket's part of backward, its `step`, and the next stage of those before."""
        yield forward_seconds
        for number, (backward_seconds, program) in enumerate(self._buckets):
            yield backward_seconds
            yield from self._perform(program.step, number)
            for earlier in range(number):
                yield from self._advance(earlier)
            self._stepped[number].finish_part(self._engine.now, self._engine)

    def finish(self) -> Iterator[float | Operation]:
        """The stages that are left of each bucket, and its `wait`."""
        for number, (_, program) in enumerate(self._buckets):
            yield self._stepped[-1 if program.sends_at_once else number]
            while True:  # once at least, as `complete` does it
                for under_way in range(number, len(self._buckets)):
                    yield from self._advance(under_way)
                if not self._stages[number]:
                    break
            yield from self._perform(program.wait, number)

    def _advance(self, number: int) -> Iterator[float | Operation]:
        """The next stage of a bucket, if one is left."""
        yield from self._perform(self._stages[number].popleft() if self._stages[number] else (), number)

    def _perform(self, actions: Sequence[Action], number: int) -> Iterator[float | Operation]:
        operations = self._operations[number]
        for action in actions:
            if isinstance(action, Work):
                yield self._work_seconds(action)
            elif isinstance(action, tuple):
                operations.append(self._engine.issue(self._rank, action))
            else:
                yield operations[action.operation]
