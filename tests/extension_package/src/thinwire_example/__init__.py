"""A package of somebody else's: a codec, a memory and an averager for thinwire."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.average import GossipAverager, GossipState
from thinwire.average.gossip.checks import check_doubly_stochastic
from thinwire.average.gossip.round import Apply, Arrive, Round, add_vector
from thinwire.average.gossip.values import Parts, flat
from thinwire.codec import Codec
from thinwire.membership import State, config, own, pending
from thinwire.memory import Memory
from thinwire.memory.base import NamedTensors, zeros_like_flat
from thinwire.topology import Ring, Topology


@dataclass(frozen=True, repr=False)
class Halves(Codec):
    """Sends every element as float16: 16 bits an element."""

    def encode_segments(self, segments: list[Tensor], keys: list[int], residuals: list[Tensor] | None) -> Tensor:
        halves = [x.half() for x in segments]
        payload = torch.cat(halves).view(torch.uint8)
        for residual, x, half in zip(residuals or [], segments, halves, strict=False):
            torch.sub(x, half.float(), out=residual)
        return payload

    def decode_add_segments(self, payload: Tensor, outs: list[Tensor], weight: float, keys: list[int]) -> None:
        parts = payload.clone().view(torch.float16).float().split([out.numel() for out in outs])
        for out, part in zip(outs, parts, strict=True):
            out.add_(part, alpha=weight)

    def segments_nbytes(self, sizes: list[int]) -> int:
        return 2 * sum(sizes)


@dataclass
class FadingState(State):
    """By parameter name: the committed error, and the buffer of the present round."""

    error: dict[str, Tensor] = own()
    buffer: dict[str, Tensor] = config()
    pending: set[str] = pending(default_factory=set)


@dataclass(frozen=True, repr=False)
class FadingMemory(Memory):
    """Error feedback that keeps a fraction of the error."""

    fraction: float = 0.5

    def init(self, tensors: NamedTensors, dense: NamedTensors = ()) -> FadingState:
        return FadingState(zeros_like_flat(tensors), zeros_like_flat(tensors))

    def compensate(self, state: FadingState, name: str, gradient: Tensor, scale: float = 1.0) -> Tensor:
        torch.add(state.error[name], gradient.reshape(-1).float(), alpha=1.0 / scale, out=state.buffer[name])
        state.pending.add(name)
        return state.buffer[name]

    def commit(self, state: FadingState) -> None:
        for name in state.pending:
            torch.mul(state.buffer[name], self.fraction, out=state.error[name])
        state.pending.clear()

    def discard(self, state: FadingState) -> None:
        state.pending.clear()


@dataclass(frozen=True, repr=False)
class LazyMix(GossipAverager):
    """Plain gossip that moves only a part of the way: `x_i <- x_i + step_size sum_j P_ij (x_j - x_i)`."""

    topology: Topology = field(default_factory=Ring)
    step_size: float = 0.5

    def check_topology(self, size: int) -> None:
        check_doubly_stochastic(self, size)

    def begin(self, state: GossipState, round: Round, own: Parts) -> Arrive:
        x = flat(own)
        wait = round.exchange(x)

        def arrive() -> Apply:
            change = torch.zeros_like(x)
            for peer, theirs in wait().items():
                change.add_(theirs - x, alpha=self.step_size * round.receives[peer])
            return add_vector(change)

        return arrive
