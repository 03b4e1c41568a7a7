"""D-PSGD: every worker takes a weighted mean of its neighbours' values and its own."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from ...topology import Ring, Topology
from ..traits import AveragerTraits
from .base import GossipAverager
from .checks import check_doubly_stochastic, check_stable, check_step_size
from .round import Apply, Arrive, GossipState, Round, add_differences
from .values import Parts, flat


@dataclass(frozen=True, repr=False)
class Mix(GossipAverager):
    """Plain gossip, uncompressed: `x_i <- sum_j P_ij x_j`, computed as `x_i + step_size sum_j P_ij (x_j - x_i)`.

    A round keeps the mean over workers. At step size 1, each round multiplies disagreement by `1 - spectral_gap` in the long
    run. On a static undirected graph, steps below `2 / (1 - lambda_min)` are stable, and `2 / (2 - lambda_2 - lambda_min)` is
    the fastest: 1.308 on a ring of 8, where the slowest difference then shrinks to 0.744 of it a round, and not 0.805. A
    worker sends `4n` bytes to each neighbour in one step, n the number of elements, or `8n` if a tensor is float64. The
    topology must be doubly stochastic; it may be directed or time-varying. `Mix(Exponential())` reaches the mean of
    `W = 2^k` workers in k rounds.

    Args:
        topology: who talks to whom, with which weights.
        step_size: above 0; 1 is the mixing matrix itself, `x <- x + step_size (P x - x)` for all others.

    Raises:
        ValueError: step_size is not positive. In `init`: the topology does not keep the mean, cannot connect this many
            workers, or gossip with this step size diverges on it.

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

    is_exact: ClassVar[bool] = True

    topology: Topology = field(default_factory=Ring)
    step_size: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_step_size(self, self.step_size)

    @cached_property
    def traits(self) -> AveragerTraits:
        return replace(super().traits, mixes_plainly=self.step_size == 1.0)

    def check_topology(self, size: int) -> None:
        check_doubly_stochastic(self, size)
        check_stable(self, self.step_size, size)

    def begin(self, state: GossipState, round: Round, own: Parts) -> Arrive:
        with state.clock("encode"):
            # A copy, because the tensors may change while the messages fly.
            sent = flat(own)

        def merge(received: dict[int, Tensor]) -> Apply:
            weights = [self.step_size * round.receives[peer] for peer in received]
            return add_differences(sent, list(received.values()), weights)

        return round.exchange(sent, merge)
