"""CHOCO: gossip on public copies of the values, which workers update by compressed differences."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ... import kernels
from ...codec import Codec
from ...comm import Communicator
from ...comm.compare import differing
from ...membership import State, averaged, config, restart
from ...schedule import resolve
from ..base import Before, NamedTensors
from .fitted_gossip import FittedGossip
from .fitted_step import decoded
from .layout import FLAT, FlatLayout
from .round import Arrive, GossipState, Round, add_vector
from .values import Parts


@dataclass
class ChocoMemory(State):
    """The worker's public copy `h_i`, and the gap `d_i = sum_j P_ij h_j - h_i` to those of its neighbours.

    All gaps together are zero, which keeps the mean over workers. In float32 their sum would drift, as a random walk, and
    every round would move the mean by it; so the gap is float64.

    Attributes:
        layout: where each tensor lies in the flat vectors.
        public: h_i, flat float32. With another number of workers all start at the mean of the copies, so that there is no gap.
        gap: d_i, flat float64.
    """

    layout: FlatLayout = config()
    public: Tensor = averaged(form=FLAT)
    gap: Tensor = restart(value=0.0, form=FLAT)


@dataclass(frozen=True, repr=False)
class Choco(FittedGossip):
    """CHOCO-Gossip: workers send compressed differences between their values and copies that neighbours keep.

    Neighbours know each worker's public copy `h_i`; worker i also keeps `d_i = sum_j P_ij h_j - h_i`:

        q_i = C(x_i - h_i)   is sent;   h_i += q_i;   d_i += sum_j P_ij q_j - q_i;   x_i += step_size d_i

    The differences shrink as the copies approach the values, so even coarse codecs reach the exact mean. A round keeps
    the mean over workers. With `Identity()` and step_size 1 it is `Mix`. A worker sends the codec's payload to each
    neighbour in one step. Memory is a float32 and a float64 copy of the tensors, for any number of neighbours: the gaps
    d_i add up to zero over workers, and in float64 rounding cannot make the mean drift. The topology must be static and
    undirected.

    Step size. By default it follows from the graph and from what the codec keeps of the differences, as
    `fitted_step.py` derives it. Each worker scales C(x_i - h_i) by the factor that fits best, which it sends behind the
    payload, so that every codec contracts. The smallest share kept travels with the payloads too, and all workers take the
    same step size from it, every `diameter` rounds; in the first of these windows it is zero. `averager.diagnostics(state)`
    shows it. A worker then sends 8 bytes more to each neighbour.

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

    def init_memory(self, state: GossipState, tensors: NamedTensors, comm: Communicator) -> ChocoMemory:
        x = state.layout.flatten(tensors)
        # Workers compare hashes, because gathering the values would cost as much as a dense round.
        is_equal = not differing(comm, [x])
        is_finite = kernels.flags.read(kernels.all_finite([x]))
        # A copy that is not finite would stay so: `_absorb` adds nothing that is not finite to the copies.
        start = x if is_equal and is_finite else torch.zeros_like(x)
        return ChocoMemory(state.layout, start, torch.zeros_like(start, dtype=torch.float64))

    def regroup_memory(self, state: GossipState, tensors: NamedTensors, comm: Communicator, before: Before) -> None:
        """Send the copies to the new neighbours, dense, for `d_i` to be the gap to them. A new worker's copy is its value."""
        memory, near = state.memory, state.topology.neighbours(comm.rank, 0, comm.size)
        if before is None or before[comm.rank] is None:
            memory.public = state.layout.flatten(tensors)
            if not kernels.flags.read(kernels.all_finite([memory.public])):
                memory.public.zero_()
        own = memory.public.double()
        memory.gap = torch.zeros_like(own)
        # The messages are dense copies, so `dict` takes them as they are.
        for peer, theirs in Round(comm, state.clock, state.progress, *near).exchange(memory.public, dict)().items():
            memory.gap.add_(theirs.double() - own, alpha=near.receives[peer])

    def begin(self, state: GossipState, round: Round, own: Parts) -> Arrive:
        codec = resolve(self.codec, round.progress)
        with state.clock("encode"):
            message = self.encoded(state, round, codec, own, state.memory.public, add=False)
        return self.arriving(state, round, message, round.self_weight, partial(self._absorb, state, codec))

    def _absorb(
        self,
        state: GossipState,
        codec: Codec,
        targets: Parts,
        messages: list[tuple[Tensor, float]],
        weights: list[float],
    ) -> bool:
        """Add the messages, payloads with factors and the own first, to the copies; move the targets.

        A payload that is not finite is added to the targets only. Returns whether all were finite.
        """
        memory: ChocoMemory = state.memory
        copies, gaps = memory.layout.parts(memory.public), memory.layout.parts(memory.gap)
        step = self.step_in_force(state)
        quantizer, numels = codec.traits.quantizer, [t.numel() for t in targets]
        # The kernel changes the copies at once, so all messages must be finite before.
        if quantizer is not None and all(
            kernels.flags.read(kernels.difference.is_finite(payload, numels, quantizer, factor))
            for payload, factor in messages
        ):
            payloads, factors = [payload for payload, _ in messages], [factor for _, factor in messages]
            kernels.difference.choco_add(targets, copies, gaps, payloads, factors, weights, step, quantizer)
            return True
        vectors, flags = zip(*(decoded(memory.layout, codec, *message) for message in messages), strict=True)
        finite = [kernels.flags.read(flag) for flag in flags]
        kept = [v if ok else torch.zeros_like(v) for v, ok in zip(vectors, finite, strict=True)]
        kernels.difference.choco_add_dense(targets, copies, gaps, kept, weights, step)
        for v, ok in zip(vectors, finite, strict=True):
            if not ok:
                add_vector(v)(targets)
        return all(finite)
