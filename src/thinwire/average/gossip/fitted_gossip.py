"""The base of gossip through a codec whose step size is fitted or pinned: CHOCO and DeepSqueeze."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from ... import debug, kernels
from ...codec import QSGD, Codec
from ...comm import Communicator
from ...topology import Ring, Topology
from ..base import NamedTensors
from ..traits import AveragerTraits
from .base import GossipAverager
from .checks import check_codec, check_fixed_undirected, check_stable, check_step_size
from .fitted_step import FittedStep, decoded, on_host, opened
from .round import Apply, Arrive, GossipState, Round, tensor_keys
from .values import Parts

Absorb = Callable[[Parts, list[tuple[Tensor, float]], list[float]], kernels.Flag]
"""Moves targets by messages, which are payloads with factors, and their weights; returns whether all was finite."""


@dataclass(frozen=True, repr=False)
class FittedGossip(GossipAverager):
    """Gossip whose `step_size`, where it is None, follows from theory and is adapted (`fitted_step.py`)."""

    topology: Topology = field(default_factory=Ring)
    codec: Codec = field(default_factory=lambda: QSGD(bits=4))
    step_size: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_codec(self, self.codec)
        check_step_size(self, self.step_size, or_none=True)

    @cached_property
    def traits(self) -> AveragerTraits:
        return replace(super().traits, couples_tensors=self.step_size is None)

    def check_topology(self, size: int) -> None:
        check_fixed_undirected(self, size)
        check_stable(self, self.step_size, size)

    def init_step_control(self, state: GossipState, tensors: NamedTensors, comm: Communicator) -> FittedStep | None:
        if self.step_size is not None:
            return None
        return FittedStep.of(state.topology, comm.size, state.layout.flatten(tensors).device)

    def step_in_force(self, state: GossipState) -> float:
        """The step size of this round."""
        return self.step_size if self.step_size is not None else on_host(state.step_control.step_size)

    def encoded(self, state: GossipState, round: Round, codec: Codec, own: Parts, memory: Tensor, add: bool) -> Tensor:
        """The message of `v = own - memory`, or with `add` of `v = own + memory`; in one pass if the codec is a quantizer.

        Args:
            state: of this worker.
            round: whose random numbers the codec draws.
            codec: of the round.
            own: this worker's values.
            memory: a flat vector; overwritten by v with `add`.
            add: whether v is the sum.
        """
        control: FittedStep | None = state.step_control
        layout, keys, quantizer = state.layout, tensor_keys(state, round), codec.traits.quantizer
        parts = layout.parts(memory)
        if quantizer is not None:
            payload = debug.empty(quantizer.nbytes([x.numel() for x in own]), dtype=torch.uint8, device=memory.device)
            mixed = [key.mixed() for key in keys]
            sums = kernels.difference.encode(own, parts, add, payload, mixed, quantizer, control is not None)
        else:
            v, combine = (memory, torch.add) if add else (debug.empty_like(memory), torch.sub)
            for x, part, out in zip(own, parts, layout.parts(v), strict=True):
                combine(x, part, out=out)
            payload, sums = codec.encode(layout.split(v), keys), None
            if control is not None:
                sums = kernels.difference.sums([v], [decoded(layout, codec, payload)[0]])
        if control is None:
            return payload
        assert sums is not None
        control.fit(sums)
        return control.with_trailer(payload, round.progress.step)

    def arriving(self, state: GossipState, round: Round, message: Tensor, own_weight: float, absorb: Absorb) -> Arrive:
        """Send this worker's message, and let `absorb` move the targets by all messages, the own one first."""

        def merge(received: dict[int, Tensor]) -> Apply:
            def apply(targets: Parts) -> kernels.Flag:
                messages = [opened(m, self.step_size is None) for m in (message, *received.values())]
                weights = [own_weight, *(round.receives[peer] for peer in received)]
                finite = absorb(targets, messages, weights)
                # After `absorb`, so that a new step size holds from the next round on.
                if state.step_control is not None:
                    state.step_control.agree(received)
                return finite

            return apply

        return round.exchange(message, merge)
