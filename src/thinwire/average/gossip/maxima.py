"""Numbers that all workers agree on, carried by the messages of gossip rounds.

    1. propose   at the start of a window each worker has a few numbers of its own
    2. flood     in each round of the window it sends the largest that it knows, and takes over what is larger
    3. agree     after as many rounds as news needs to reach all, every worker holds the maxima over all workers

So all workers decide alike, from the same bits, in the same round, without a message more. The maxima of a window are known
at its end; until the first one has ended there are none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...membership import State, config, restart
from ...topology import Topology
from ...topology.speed import rounds_to_reach_all


@dataclass
class Maxima(State):
    """The numbers under way in a window.

    Attributes:
        topology: who talks to whom.
        size: number of workers.
        flying: the largest that this worker knows of in this window, float32, one for each number.
        age: rounds of this window that have ended.
        span: rounds of this window.
    """

    topology: Topology = config()
    size: int = config()
    flying: Tensor = restart()
    age: int = restart(default=0)
    span: int = restart(default=1)

    def sent(self, own: Tensor, step: int) -> Tensor:
        """What to send in a round: at the start of a window, this worker's own numbers.

        Args:
            own: this worker's numbers.
            step: of the round.
        """
        if self.age == 0:
            self.flying.copy_(own)
            # Where steps repeat, so does the number of rounds: the cache of `rounds_to_reach_all` needs one period.
            periodic = self.topology.steps(self.size) == range(self.topology.period(self.size))
            start = step % self.topology.period(self.size) if periodic else step
            # One worker alone needs 0 rounds, and a window has at least one.
            self.span = max(1, rounds_to_reach_all(self.topology, self.size, start))
        return self.flying

    def received(self, theirs: Iterable[Tensor]) -> Tensor | None:
        """Merge what neighbours sent. Returns the maxima over all workers at the end of a window, else None."""
        for numbers in theirs:
            torch.maximum(self.flying, numbers, out=self.flying)
        self.age = (self.age + 1) % self.span
        return self.flying if self.age == 0 else None
