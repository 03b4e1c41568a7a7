"""Push-sum (SGP): gossip on directed and time-varying graphs, with a weight beside the values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from ... import kernels
from ...topology import Exponential, Topology
from .base import GossipAverager
from .checks import check_column_stochastic
from .nodes import pack_weighted, unpack_weighted
from .round import Apply, Arrive, GossipState, Round, add_differences
from .values import Parts


@dataclass(frozen=True, repr=False)
class PushSum(GossipAverager):
    """Stochastic Gradient Push: `x_i <- sum_j P_ij x_j`, `w_i <- sum_j P_ij w_j`; `z_i = x_i / w_i` is the estimate.

    P must be column-stochastic only: each worker divides its own value, so every topology suits, directed and
    time-varying ones too. The tensors hold the *biased* x, and rounds keep the sum of x over workers. `state.weight` is w;
    it starts at 1.0, and the sum of w is W. A model's forward pass reads `z = x * averager.debias_factor(state)`, and the
    gradient at z updates x. If P is doubly stochastic, w stays 1 up to rounding.

    A worker sends `4n + 8` bytes to each neighbour in one step: x as float32 and w as float64. It sends `8n + 8` if a
    tensor is float64.

    Args:
        topology: who sends to whom.

    Raises:
        ValueError: in `init`, if the topology cannot connect this many workers.

    Source: Assran et al. 2019, Stochastic Gradient Push, arXiv 1811.10792; Kempe et al. 2003 (push-sum).

    Example:
        >>> import torch, thinwire as tw
        >>> def worker(comm):
        ...     x = torch.tensor([float(comm.rank)])
        ...     averager = tw.PushSum(tw.topology.DirectedGraph(((0, 1), (1, 2), (2, 0), (0, 2))))
        ...     state = averager.init([("x", x)], comm)
        ...     for _ in range(40):
        ...         averager.step(state, [("x", x)], comm).wait()
        ...     return round(x.item() * averager.debias_factor(state), 5)
        >>> tw.LocalWorld(3).run(worker)
        [1.0, 1.0, 1.0]
    """

    is_exact: ClassVar[bool] = True

    topology: Topology = field(default_factory=Exponential)

    def check_topology(self, size: int) -> None:
        check_column_stochastic(self, size)

    def begin(self, state: GossipState, round: Round, own: Parts) -> Arrive:
        weight, dtype = state.weight, state.layout.dtype
        with state.clock("encode"):
            sent = pack_weighted(weight, *own)

        def merge(received: dict[int, Tensor]) -> Apply:
            def apply(targets: Parts) -> kernels.Flag:
                theirs = {peer: unpack_weighted(message, dtype) for peer, message in received.items()}
                weights = [round.receives[peer] for peer in theirs]
                own_weight = round.self_weight - 1.0 + sum(weights)  # zero if this worker's weights add up to one
                state.weight += own_weight * weight
                for peer, (their_weight, _) in theirs.items():
                    state.weight += round.receives[peer] * (their_weight - weight)
                # The x that was sent, because the targets may have changed since.
                x, xs = unpack_weighted(sent, dtype)[1], [x for _, x in theirs.values()]
                return add_differences(x, xs, weights, own_weight)(targets)

            return apply

        return round.exchange(sent, merge)
