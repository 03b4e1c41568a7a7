"""ClippedGossip: gossip that bounds how far one neighbour can move a worker."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...algorithm import require
from ...comm import Communicator
from ...membership import State, pending, restart
from ...options import require_integer, require_number
from ...topology import Hierarchical, Ring, Topology
from ..base import NamedTensors
from ..robust.base import norms_of
from ..traits import AveragerTraits
from .base import GossipAverager
from .checks import check_doubly_stochastic
from .round import Apply, Arrive, GossipState, Round, add_differences
from .values import Parts, flat


@dataclass
class Clipping(State):
    """What the last round of a worker clipped.

    Attributes:
        tau: the bound.
        dropped: neighbour -> norm of the clipped part of its difference; infinity if the neighbour was left out.
    """

    tau: float = restart(default=0.0)
    dropped: dict[int, float] = pending(default_factory=dict)

    def diagnostics(self) -> dict[str, float]:
        """The bound, and for each neighbour the norm of the clipped part of its difference."""
        return {"tau": self.tau} | {f"clipped/{peer}": norm for peer, norm in self.dropped.items()}


@dataclass(frozen=True, repr=False)
class ClippedGossip(GossipAverager):
    """`x_i <- x_i + sum_j P_ij clip(x_j - x_i, tau_i)`, uncompressed, with `clip(u, tau) = u min(1, tau / |u|)`.

    A worker moves towards each neighbour by at most `P_ij tau_i`. A neighbour whose values are not finite is left out.
    `averager.diagnostics(state)` shows the bound and what was clipped. Neighbours clip unequally, so a round does not keep the
    mean over workers exactly. Bytes are those of `Mix`, 4n to each neighbour.

    Args:
        topology: who talks to whom, with which weights; doubly stochastic, and not hierarchical.
        tau: the bound; infinity gives `Mix`. None takes, in each round, the largest distance to a neighbour after leaving out
            the `faulty` largest.
        faulty: with `tau=None`, how many of a worker's neighbours may be wrong; each worker needs more neighbours than that.

    Raises:
        ValueError: tau is not positive, or faulty not an integer, 0 or more. In `init`: a topology that does not suit.

    Source: He, Karimireddy and Jaggi 2022, Byzantine-Robust Decentralized Learning via ClippedGossip, arXiv 2202.01545; the
    bound for `tau=None` is the one of its code.

    Example:
        >>> import torch, thinwire as tw
        >>> def worker(comm):
        ...     x = torch.tensor([0.0, 1.0, 2.0, 1e6])[comm.rank].view(1)
        ...     averager = tw.average.ClippedGossip(tw.Complete())
        ...     averager.step(averager.init([("x", x)], comm), [("x", x)], comm).wait()
        ...     return x.item()
        >>> tw.LocalWorld(4).run(worker)[:3]
        [1.25, 1.25, 1.75]
    """

    is_exact: ClassVar[bool] = True

    topology: Topology = field(default_factory=Ring)
    tau: float | None = None
    faulty: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("ClippedGossip: tau", self.tau, above=0, most=math.inf, or_none=True)
        require_integer("ClippedGossip: faulty", self.faulty, 0)
        require(
            not isinstance(self.topology, Hierarchical),
            f"ClippedGossip: the workers of a node take their plain mean under {self.topology}; use another topology",
        )

    @cached_property
    def traits(self) -> AveragerTraits:
        return replace(super().traits, keeps_mean=self.tau == math.inf, couples_tensors=True)

    def check_topology(self, size: int) -> None:
        check_doubly_stochastic(self, size)
        if self.tau is not None or size == 1:
            return
        rounds = [(rank, step) for rank in range(size) for step in range(self.topology.period(size))]
        fewest = min(len(self.topology.neighbours(rank, step, size).receives) for rank, step in rounds)
        require(
            fewest > self.faulty,
            f"{self}: a worker has {fewest} neighbours among {size} workers, and faulty={self.faulty} needs "
            f"{self.faulty + 1} or more; use a denser graph such as Complete(), or give tau",
        )

    def init_step_control(self, state: GossipState, tensors: NamedTensors, comm: Communicator) -> Any:
        # It has no step size to control, but `diagnostics` shows this record in the same way.
        return Clipping()

    def begin(self, state: GossipState, round: Round, own: Parts) -> Arrive:
        with state.clock("encode"):
            sent = flat(own)

        def merge(received: dict[int, Tensor]) -> Apply:
            with state.clock("decode"):
                factors = self._factors(state.step_control, sent, received)
            weights = [factor * round.receives[peer] for peer, factor in factors.items()]
            return add_differences(sent, [received[peer] for peer in factors], weights)

        return round.exchange(sent, merge)

    def _factors(self, clipping: Clipping, own: Tensor, received: dict[int, Tensor]) -> dict[int, float]:
        """The factor of each neighbour's difference. Neighbours whose values are not finite are left out."""
        # One neighbour at a time, so that only one difference takes memory.
        norms = [norms_of((theirs - own)[None]).view(1) for theirs in received.values()]
        # The host reads all norms at once.
        found: list[float] = torch.cat(norms).tolist() if norms else []
        distances = {peer: d if math.isfinite(d) else math.inf for peer, d in zip(received, found, strict=True)}
        if self.tau is not None:
            clipping.tau = self.tau
        else:
            largest_first = sorted(distances.values(), reverse=True)
            # After `regroup` a ring may have too few neighbours for `faulty`; then nothing moves.
            clipping.tau = largest_first[self.faulty] if len(largest_first) > self.faulty else 0.0
        factors = {peer: min(1.0, clipping.tau / d) if d else 1.0 for peer, d in distances.items() if d < math.inf}
        clipping.dropped = {
            peer: d * (1 - factors[peer]) if peer in factors else math.inf
            for peer, d in distances.items()
            if factors.get(peer, 0.0) < 1.0
        }
        return factors
