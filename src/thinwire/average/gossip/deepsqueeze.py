"""DeepSqueeze: gossip on compressed values; each worker adds the codec's error to its next value."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ... import kernels
from ...codec import Codec
from ...comm import Communicator
from ...membership import State, config, own
from ...schedule import resolve
from ..base import NamedTensors
from .fitted_gossip import FittedGossip
from .fitted_step import decoded
from .layout import FLAT, FlatLayout
from .round import Arrive, GossipState, Round, add_vector
from .values import Parts


@dataclass
class DeepSqueezeMemory(State):
    """What the last payload did not carry, `d_i`.

    Attributes:
        layout: where each tensor lies in the flat vector.
        lost: d_i, flat.
    """

    layout: FlatLayout = config()
    lost: Tensor = own(form=FLAT)


@dataclass(frozen=True, repr=False)
class DeepSqueeze(FittedGossip):
    """Error-compensated gossip, with a memory `d_i` that starts at zero:

        v_i = x_i + d_i;   C(v_i) is sent;   d_i = v_i - C(v_i);   x_i += step_size sum_j P_ij (C(v_j) - C(v_i))

    A round keeps the mean over workers. It compresses the values, not their differences, so the codec's error does not
    vanish as workers agree: disagreement settles at a level that falls with step_size. With `Identity()` and step_size 1
    it is `Mix`. A worker sends the codec's payload to each neighbour in one step. Memory is one float32 copy of the
    tensors. The topology must be static and undirected.

    Step size. By default it follows from the graph and from what the codec keeps of v, as `fitted_step.py` derives it.
    Each worker scales C(v_i) by the factor that fits best, which it sends behind the payload, so that every codec
    contracts. The smallest share kept travels with the payloads too, and all workers take the same step size from it, every
    `diameter` rounds; in the first of these windows it is zero. `averager.diagnostics(state)` shows it. A worker then sends 8
    bytes more to each neighbour.

    With a number as step size the payload is as the codec makes it, and the codec's error must be smaller than its input,
    `E|C(x) - x|^2 < |x|^2`. This holds for sparsifiers, `SignNorm` and fine quantizers. It does not hold for
    `QSGD(bits=2)` with its buckets of 512, which then makes no progress.

    A round with a non-finite vector leaves memory as it was; one in which `x_i + d_i` overflows
    empties it. Non-finite parameters spread, as in any gossip.

    Args:
        topology: who talks to whom, with which weights.
        codec: encodes the values; tensors are its segments.
        step_size: None => from theory, adapted; a number above 0 pins it: higher => faster, until it diverges, and more
            disagreement in the end. A coarser codec needs a lower one: on a ring of 8, `TopK(0.01)` is stable at 0.005,
            `QSGD(bits=4)` at 0.05 and above.

    Raises:
        ValueError: step_size is not positive, or the codec's payloads vary in size. In `init`: a directed or time-varying
            topology, or a step size with which even uncompressed gossip diverges.

    Source: Tang et al. 2019, arXiv 1907.07346.

    Example:
        >>> import thinwire as tw
        >>> tw.DeepSqueeze(tw.Ring(), tw.QSGD(bits=4), step_size=0.1)
        DeepSqueeze(step_size=0.1)
    """

    def init_memory(self, state: GossipState, tensors: NamedTensors, comm: Communicator) -> DeepSqueezeMemory:
        return DeepSqueezeMemory(state.layout, torch.zeros_like(state.layout.flatten(tensors)))

    def begin(self, state: GossipState, round: Round, own: Parts) -> Arrive:
        codec = resolve(self.codec, round.progress)
        with state.clock("encode"):
            remembers = kernels.flags.read(kernels.all_finite(own))
            # Until the round is applied, `lost` holds x + d; a vector that is not finite leaves it as it is.
            v = state.memory.lost if remembers else state.memory.lost.clone()
            message = self.encoded(state, round, codec, own, v, add=True)
        absorb = partial(self._absorb, state, codec, remembers)
        try:
            return self.arriving(state, round, message, sum(round.receives.values()), absorb)
        except Exception:
            if remembers:  # the round has not begun, so memory goes back
                for part, x in zip(state.layout.parts(state.memory.lost), own, strict=True):
                    part.sub_(x)
            raise

    def _absorb(
        self,
        state: GossipState,
        codec: Codec,
        remembers: bool,
        targets: Parts,
        messages: list[tuple[Tensor, float]],
        weights: list[float],
    ) -> kernels.Flag:
        """Move the targets by the messages, payloads with factors and the own first; subtract the own one from `lost`."""
        layout, lost = state.layout, state.memory.lost
        step = self.step_in_force(state)
        quantizer, numels = codec.traits.quantizer, [t.numel() for t in targets]
        payloads, factors = [payload for payload, _ in messages], [factor for _, factor in messages]
        if quantizer is not None:
            rests = layout.parts(lost) if remembers else None
            kernels.difference.squeeze_add(targets, rests, payloads, factors, weights, step, quantizer)
            flags = [kernels.difference.is_finite(p, numels, quantizer, factor) for p, factor in messages]
            if not kernels.flags.read(flags[0]) and remembers:
                lost.zero_()  # x + d has overflowed
            return kernels.flags.both(remembers, kernels.flags.all_of(flags))
        change, finite = decoded(layout, codec, *messages[0])
        if remembers:
            lost.sub_(change)
            if not kernels.flags.read(finite):
                lost.zero_()
        # `weights[0]` is the sum of the other weights: each message counts by its difference to the own one.
        change.mul_(-weights[0])
        for (payload, factor), weight in zip(messages[1:], weights[1:], strict=True):
            codec.decode_add(payload, layout.split(change), factor * weight)
        finite = kernels.flags.both(finite, add_vector(change.mul_(step))(targets))
        return kernels.flags.both(remembers, finite)
