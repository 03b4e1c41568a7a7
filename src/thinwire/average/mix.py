"""D-PSGD: every worker takes a weighted mean of its neighbours' values and its own."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..topology import Ring, Topology
from .gossip_base import Gossip
from .gossip_checks import check_doubly_stochastic
from .gossip_round import Change, GossipState, Round


@dataclass(frozen=True, repr=False)
class Mix(Gossip):
    """Plain gossip, uncompressed: `x_i <- sum_j P_ij x_j`, computed as `x_i + sum_j P_ij (x_j - x_i)`.

    A round keeps the mean over workers. In the long run each round multiplies disagreement by `1 - spectral_gap`. A
    worker sends `4n` bytes to each neighbour in one step, n the number of elements, or `8n` if a tensor is float64. The
    topology must be doubly stochastic; it may be directed or time-varying. `Mix(Exponential())` reaches the mean of
    `W = 2^k` workers in k rounds.

    Args:
        topology: who talks to whom, with which weights.

    Raises:
        ValueError: in `init`, if the topology does not keep the mean, or cannot connect this many workers.

    Source: Lian et al. 2017, Can Decentralized Algorithms Outperform Centralized Algorithms?, arXiv 1705.09056.

    Example:
        >>> import torch, thinwire as tw
        >>> def worker(comm):
        ...     x = torch.tensor([float(comm.rank)])
        ...     averager = tw.Mix(tw.Exponential())
        ...     state = averager.init([("x", x)], comm)
        ...     for _ in range(2):
        ...         averager.step(state, [("x", x)], comm).wait()
        ...     return x.item()
        >>> tw.LocalWorld(4).run(worker)
        [1.5, 1.5, 1.5, 1.5]
    """

    topology: Topology = field(default_factory=Ring)

    @property
    def mixes_plainly(self) -> bool:
        return True

    @property
    def is_exact(self) -> bool:
        return True

    def check_topology(self, size: int) -> None:
        check_doubly_stochastic(self, size)

    def begin(self, state: GossipState, round: Round, own: Tensor) -> Change:
        wait = round.exchange(own)

        def finish() -> Tensor:
            with state.clock("wait"):
                received = wait()
            change = torch.zeros_like(own)
            for peer, theirs in received.items():
                change.add_(theirs.sub_(own), alpha=round.receives[peer])
            return change

        return finish
