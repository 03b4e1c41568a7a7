"""CHOCO: gossip on public copies of the values, which workers update by compressed differences."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..codec import QSGD, Codec
from ..comm import Communicator
from ..membership import mean_of
from ..schedule import resolve
from ..topology import Ring, Topology
from .base import NamedTensors
from .fitted_gossip import FittedGossip
from .fitted_step import FittedStep, decoded, rescaled
from .gossip_round import Arrive, GossipState, Round, add_vector, tensor_keys
from .gossip_values import Parts
from .layout import Layout


@dataclass
class ChocoMemory:
    """The worker's public copy `h_i`, and `s_i = sum_j P_ij h_j` over its neighbours and itself.

    Attributes:
        layout: where each tensor lies in the flat vectors.
        public: h_i, flat.
        weighted_sum: s_i, flat.
    """

    layout: Layout
    public: Tensor
    weighted_sum: Tensor

    def state_dict(self) -> dict[str, Any]:
        """Both vectors, keyed by tensor name."""
        return {"public": self.layout.named(self.public), "weighted_sum": self.layout.named(self.weighted_sum)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.layout.load(self.public, saved["public"])
        self.layout.load(self.weighted_sum, saved["weighted_sum"])


@dataclass(frozen=True, repr=False)
class Choco(FittedGossip):
    """CHOCO-Gossip. Neighbours know each worker's public copy `h_i`; worker i also keeps `s_i = sum_j P_ij h_j`:

        q_i = C(x_i - h_i)   is sent;   h_i += q_i;   s_i += sum_j P_ij q_j;   x_i += step_size (s_i - h_i)

    The differences shrink as the copies approach the values, so even coarse codecs reach the exact mean. A round keeps
    the mean over workers. With `Identity()` and step_size 1 it is `Mix`. A worker sends the codec's payload to each
    neighbour in one step. Memory is two float32 copies of the tensors, for any number of neighbours. The topology must
    be static and undirected.

    Step size. By default it follows from the graph and from what the codec keeps of the differences, as
    `fitted_step.py` derives it. Each worker scales C(x_i - h_i) by the factor that fits best, which it sends behind the
    payload, so that every codec contracts. The smallest share kept travels with the payloads too, and all workers take the
    same step size from it, every `diameter` rounds; in the first of these windows it is zero. `averager.facts(state)` shows
    it. A worker then sends 8 bytes more to each neighbour.

    With a number as step size the payload is as the codec makes it, and the codec's error must be smaller than its input,
    `E|C(x) - x|^2 < |x|^2`. This holds for sparsifiers, `SignNorm` and fine quantizers. It does not hold for
    `QSGD(bits=2)` with its buckets of 512, which then diverges at any step size; smaller buckets help.

    The copies start at zero, as in the paper. If all workers hold the same bits at `init`, as when training starts, the
    copies start at these values. A sparse codec would need many rounds to send them.

    A payload with an infinite or NaN element changes no copy, at either end. It makes the tensors of the sender and its
    neighbours non-finite. After their parameters are restored, training goes on with finite memory.

    Args:
        topology: who talks to whom, with which weights.
        codec: encodes the differences; tensors are its segments.
        step_size: None => from theory, adapted; a number above 0 pins it: higher => faster, until it diverges. A coarser
            codec needs a lower one: on a ring of 8, `TopK(0.01)` is stable at 0.02 and diverges slowly at 0.05; `TopK(0.1)`
            is stable at 0.2, and `QSGD(bits=4)` at 1. Above 1 it is stable with fine codecs only, and below
            `2 / (1 - lambda_min)`, 1.5 on a ring.

    Raises:
        ValueError: step_size is not positive, or the codec's payloads vary in size. In `init`: a directed or time-varying
            topology, or a step size with which even uncompressed gossip diverges.

    Source: Koloskova et al. 2019, arXiv 1902.00340; for deep learning arXiv 1907.09356.

    Example:
        >>> import thinwire as tw
        >>> tw.Choco(tw.Ring(), tw.TopK(0.01), step_size=0.02)
        Choco(codec=TopK(ratio=0.01), step_size=0.02)
    """

    topology: Topology = field(default_factory=Ring)
    codec: Codec = field(default_factory=lambda: QSGD(bits=4))
    step_size: float | None = None

    def init_memory(self, state: GossipState, tensors: NamedTensors, comm: Communicator) -> ChocoMemory:
        x = state.layout.flatten(tensors)
        own = "" if x.is_meta else hashlib.blake2b(x.cpu().numpy().data, digest_size=16).hexdigest()  # meta: no values
        digests = comm.gather_objects(own)
        is_finite = kernels.flags.read(kernels.all_finite([x]))
        start = x if len(set(digests)) == 1 and is_finite else torch.zeros_like(x)
        return ChocoMemory(state.layout, start, start.clone())

    def deal_memory(self, saved: list[Any], rank: int, size: int) -> Any:
        """All workers start at the mean of the copies, so every weighted sum of copies is that mean too."""
        public = mean_of([one["public"] for one in saved])
        return {"public": public, "weighted_sum": public}

    def regroup_memory(
        self, state: GossipState, tensors: NamedTensors, comm: Communicator, before: Sequence[int | None] | None
    ) -> None:
        """Send the copies to the new neighbours, dense, for `s_i` to be their sum again. A new worker's copy is its value."""
        memory, near = state.memory, state.topology.neighbours(comm.rank, 0, comm.size)
        if before is None or before[comm.rank] is None:
            memory.public = state.layout.flatten(tensors)
            if not kernels.flags.read(kernels.all_finite([memory.public])):
                memory.public.zero_()
        memory.weighted_sum = memory.public * near.self_weight
        for peer, theirs in Round(comm, state.progress, *near).exchange(memory.public)().items():
            memory.weighted_sum.add_(theirs, alpha=near.receives[peer])

    def begin(self, state: GossipState, round: Round, own: Parts) -> Arrive:
        x = torch.cat(own)
        state.finite = kernels.flags.both(state.finite, kernels.all_finite([x]))
        finish = self._begin(state, round, x)
        return lambda: add_vector(finish())

    def _begin(self, state: GossipState, round: Round, own: Tensor) -> Callable[[], Tensor]:
        memory, codec = state.memory, resolve(self.codec, round.progress)
        pace: FittedStep | None = state.pace
        with state.clock("encode"):
            difference = own - memory.public
            message = codec.encode(state.layout.split(difference), tensor_keys(state, round))
            if pace is not None:
                q = pace.fit(difference, decoded(state.layout, codec, message))
                message = pace.with_trailer(message, round.progress.step)
        wait = round.exchange(message)

        def finish() -> Tensor:
            with state.clock("wait"):
                received = wait()
            with state.clock("decode"):
                change = torch.zeros_like(own)
                mine = decoded(state.layout, codec, message) if pace is None else q
                _absorb(mine, [(memory.public, 1.0), (memory.weighted_sum, round.self_weight)], change)
                for peer, theirs in received.items():
                    arrived = (decoded if pace is None else rescaled)(state.layout, codec, theirs)
                    _absorb(arrived, [(memory.weighted_sum, round.receives[peer])], change)
                if pace is None:
                    return change.add_(memory.weighted_sum - memory.public, alpha=self.step_size)
                change.add_((memory.weighted_sum - memory.public).mul_(pace.step_size))
                pace.agree(received)
                return change

        return finish


def _absorb(q: Tensor, into: list[tuple[Tensor, float]], poisoned: Tensor) -> None:
    """Add a decoded payload to its copies; or, if it is not finite, to `poisoned` only."""
    if not kernels.flags.read(kernels.all_finite([q])):
        poisoned.add_(q)
        return
    for target, weight in into:
        target.add_(q, alpha=weight)
