"""Workers in threads whose messages are counted by receiver, and timed in steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..comm.ledger import broadcast_tree
from ..comm.local_world import LocalCommunicator

Departures = defaultdict[tuple[int, int], list[int]]
"""(sender, receiver) => after how many steps each message left."""


class TimedCommunicator(LocalCommunicator):
    """A worker whose messages take a step each, as they would on a network, and whose work takes no time.

    Args:
        comm: of the `LocalWorld`; not used beside this one.
        departures: the same for all workers.

    Attributes:
        num_steps: after how many steps the last message came that this worker waited for.
        sent: peer -> bytes, of an all-reduce around a ring, and of a broadcast in a tree.
    """

    def __init__(self, comm: LocalCommunicator, departures: Departures):
        super().__init__(comm.rank, comm.size, comm._mail)
        self.num_steps, self.sent = 0, defaultdict[int, float](float)
        self._departures, self._latency = departures, 1

    def _start_all_reduce(self, tensor: Tensor) -> Callable[[], Any]:
        self._latency = 2 * (self.size - 1)
        # Not rounded to whole elements, so that formulas are exact.
        self.sent[(self.rank + 1) % self.size] += self._latency * tensor.nbytes / self.size
        return super()._start_all_reduce(tensor)

    def _start_gather_variable(self, tensor: Tensor, result: list[Tensor], limit: int) -> Callable[[], Any]:
        self._latency = 2
        self._count(dict.fromkeys(self._others([tensor] * self.size), 8 + tensor.nbytes))
        return super()._start_gather_variable(tensor, result, limit)

    def _start_exchange(self, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> Callable[[], Any]:
        self._latency = 1
        self._count({peer: message.nbytes for peer, message in sends.items()})
        return super()._start_exchange(sends, receives)

    def _start_broadcast(self, tensor: Tensor, root: int) -> Callable[[], Any]:
        self._latency = ((self.rank - root) % self.size).bit_length()
        self._count(dict.fromkeys(broadcast_tree(self.size, self.rank, root)[1], tensor.nbytes))
        if self.rank == root:
            return super()._start_exchange(self._others([tensor] * self.size), {})
        return super()._start_exchange({}, {root: tensor})

    def _count(self, num_bytes: dict[int, int]) -> None:
        for peer, n in num_bytes.items():
            self.sent[peer] += n

    def _post(self, messages: dict[int, Tensor], sources: list[int]) -> Callable[[], dict[int, Tensor]]:
        for peer in messages:
            self._departures[self.rank, peer].append(self.num_steps)
        places, latency = {source: self._num_received[source] for source in sources}, self._latency
        take = super()._post(messages, sources)

        def arrive() -> dict[int, Tensor]:
            received = take()
            left = [self._departures[source, self.rank][place] for source, place in places.items()]
            self.num_steps = max([self.num_steps, *(departure + latency for departure in left)])
            return received

        return arrive
