"""Whether what workers issue also ends where each of them runs one operation after another, as NCCL does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import thinwire as tw


@dataclass
class Operation:
    """One that a worker has issued: to whom it still has to send, and from whom to receive."""

    name: str
    sends: set[int] = field(default_factory=set)
    receives: set[int] = field(default_factory=set)


def operations_of(size: int, work: Callable[..., Any], *args: Any) -> list[list[Operation]]:
    """What each of `size` workers issues in `work(comm, *args)`, in order."""
    issued: list[list[Operation]] = [[] for _ in range(size)]

    def worker(comm: tw.Communicator) -> None:
        submit = comm._submit

        def note(operation: str, tensors: Any, start: Any, *rest: Any) -> Any:
            if start.func.__name__ == "_start_exchange":
                peers = [set(part) for part in start.args]
            else:
                peers = [set(range(comm.size)) - {comm.rank}] * 2
            issued[comm.rank].append(Operation(operation, set(peers[0]), set(peers[1])))
            return submit(operation, tensors, start, *rest)

        comm._submit = note
        work(comm, *args)

    tw.LocalWorld(size).run(worker)
    return issued


def stuck(issued: list[list[Operation]], buffered: bool) -> list[str]:
    """The operations that never end; empty if all do.

    Args:
        issued: by each worker, in order; used up.
        buffered: whether a message leaves before its receiver is there for it.
    """
    queues, mail, moved = [list(operations) for operations in issued], Counter[tuple[int, int]](), True
    while moved:
        moved = False
        for rank, queue in enumerate(queues):
            while queue and not queue[0].sends and not queue[0].receives:
                queue.pop(0)
                moved = True
            if not queue:
                continue
            for peer in list(queue[0].sends):
                there = queues[peer][0].receives if queues[peer] else set()
                if buffered:
                    mail[rank, peer] += 1
                elif rank in there:
                    there.remove(rank)
                else:
                    continue
                queue[0].sends.remove(peer)
                moved = True
            for peer in [peer for peer in queue[0].receives if mail[peer, rank]]:
                mail[peer, rank] -= 1
                queue[0].receives.remove(peer)
                moved = True
    return [f"rank {rank}: {queue[0]}" for rank, queue in enumerate(queues) if queue]
