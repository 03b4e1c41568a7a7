"""LoCo: a moving average of what payloads did not carry, kept in 8 bits and cleared now and then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..membership import Form, State, config, load_tensors, own, pending, shared
from ..options import require_integer, require_number
from .base import Memory, NamedTensors, zeros_like_flat


def _load_errors(state: LoCoState, codes: dict[str, Tensor], saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    # Loaded into `sent`, which the next round overwrites anyway.
    load_tensors(state.sent, saved, "LoCo memory")
    for name, error in state.sent.items():
        state.store(name, error)
    return codes


ERRORS = Form(lambda state, codes: {name: state.error(name) for name in codes}, _load_errors)
"""e in float32, by parameter name; it loads with the same bits."""


@dataclass
class LoCoState(State):
    """What `LoCo` keeps, in unscaled units.

    Args:
        codes: e of each tensor in units of its scale, int8.
        scales: the scale of each tensor, a power of two; 0 while e is zero.
        sent: the values to send; after encoding, what the payload did not carry.
        rounds: committed rounds.
        pending: names of the tensors that were compensated since the last commit.
    """

    codes: dict[str, Tensor] = own(form=ERRORS)
    scales: dict[str, Tensor] = config()
    sent: dict[str, Tensor] = config()
    rounds: int = shared(default=0)
    pending: set[str] = pending(default_factory=set)

    def error(self, name: str) -> Tensor:
        """e of a tensor, flat float32."""
        return self.codes[name].float() * self.scales[name]

    def store(self, name: str, error: Tensor) -> None:
        """Round e to 8 bits: to the nearest multiple of the smallest power of two that reaches its largest magnitude."""
        # 127 and not 128: int8 has no +128, and both signs share the scale.
        peak = error.abs().max() / 127 if error.numel() else error.new_zeros(())
        # A power of two, so that e / scale is exact, and saving and loading keep its bits.
        scale = torch.where(peak > 0, torch.exp2(torch.ceil(torch.log2(peak.clamp(min=2.0**-126)))), 0.0)
        self.scales[name].copy_(scale)
        self.codes[name].copy_(torch.where(scale > 0, error / scale, 0.0).round())


@dataclass(frozen=True, repr=False)
class LoCo(Memory):
    """Adds a moving average of past errors to the gradient: send `C(g + e)`, keep `e <- (1 - b) e + b (g + e - C(g + e))`.

    e is kept in 8 bits and starts again at zero every `reset_every` rounds. It costs one byte and one float32 copy of what is
    encoded. Unlike `ErrorFeedback` it delivers only a part of what is late, and never more than is in the average. Use it
    with codecs of a few bits for every element, such as `QSGD(bits=4)`; sparse codecs need all of the error.

    Args:
        beta: b, in (0, 1]; lower => smoother, smaller compensation.
        reset_every: rounds after which e becomes zero; None never clears it.

    Raises:
        ValueError: a value out of range.

    Source: Xie et al. 2024, LoCo, arXiv 2407.04480.

    Example:
        >>> import torch, thinwire as tw
        >>> memory, codec = tw.memory.LoCo(beta=0.5), tw.TopK(ratio=0.5)
        >>> state = memory.init([("w", torch.zeros(2))])
        >>> x = memory.compensate(state, "w", torch.tensor([3.0, 1.0]))
        >>> payload = codec.encode(x, residual=x)
        >>> memory.commit(state)
        >>> state.error("w")  # half of what was not sent
        tensor([0.0000, 0.5000])
    """

    beta: float = 0.5
    reset_every: int | None = 512

    def __post_init__(self) -> None:
        require_number("LoCo: beta", self.beta, above=0, most=1)
        require_integer("LoCo: reset_every", self.reset_every, 1, or_none=True)

    def init(self, tensors: NamedTensors, dense: NamedTensors = ()) -> LoCoState:
        codes = {name: t.new_zeros(t.numel(), dtype=torch.int8) for name, t in tensors}
        scales = {name: t.new_zeros((), dtype=torch.float32) for name, t in tensors}
        return LoCoState(codes, scales, zeros_like_flat(tensors))

    def compensate(self, state: LoCoState, name: str, gradient: Tensor, scale: float = 1.0) -> Tensor:
        flat = gradient.detach().reshape(-1).float()
        state.pending.add(name)
        return torch.add(state.error(name), flat, alpha=1 / scale, out=state.sent[name])

    def commit(self, state: LoCoState) -> None:
        # A round that encoded nothing brings the reset no nearer.
        state.rounds += bool(state.pending)
        clears = self.reset_every is not None and state.rounds % self.reset_every == 0
        for name in state.pending:
            kept = state.error(name) * (1 - self.beta)
            state.store(name, torch.zeros_like(kept) if clears else kept.add_(state.sent[name], alpha=self.beta))
        state.pending.clear()
