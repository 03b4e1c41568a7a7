"""Momentum of each worker's own gradients, which is what is sent: Signum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..algorithm import require
from .base import Memory, NamedTensors, load_buffers, zeros_like_flat
from .momentum import Pair


@dataclass
class LocalMomentumState:
    """What `LocalMomentum` keeps by parameter name: flat float32 tensors, in unscaled units.

    Args:
        own: u of encoded tensors, this worker's own.
        shared: u of the mean of dense tensors, the same on all workers.
        sent: the values to send; after encoding, what the payload did not carry, which is dropped.
    """

    own: dict[str, Pair]
    shared: dict[str, Pair]
    sent: dict[str, Tensor]

    def pairs(self) -> dict[str, Pair]:
        """All buffers, under their saved names."""
        own = {f"{name}.momentum": pair for name, pair in self.own.items()}
        return own | {f"{name}.mean_momentum": pair for name, pair in self.shared.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """The committed buffers: `<parameter>.momentum`, or `<parameter>.mean_momentum` of a dense tensor."""
        return {name: pair.kept.clone() for name, pair in self.pairs().items()}

    def load_state_dict(self, saved: dict[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""
        load_buffers({name: pair.kept for name, pair in self.pairs().items()}, saved, "momentum")
        for pair in self.pairs().values():
            pair.is_pending = False


@dataclass(frozen=True, repr=False)
class LocalMomentum(Memory):
    """Each worker sends its own momentum: `u_i <- m u_i + (1 - m) g_i`, send `C(u_i)`. Nothing else is remembered.

    With a vote of signs this is Signum: `Mean(SignSGD(), LocalMomentum(0.9), min_ndim=0)`. Of a tensor that travels dense, and
    of all tensors under a lossless codec, the momentum of the mean is the result. The optimizer must have no momentum of its
    own. Costs three float32 copies of what is encoded.

    Args:
        momentum: m, in [0, 1); higher => smoother signs, which follow the gradients later.

    Raises:
        ValueError: momentum out of range.

    Source: Bernstein et al. 2018, signSGD, arXiv 1802.04434 (Signum); with majority vote, arXiv 1810.05291.

    Example:
        >>> import torch, thinwire as tw
        >>> memory = tw.memory.LocalMomentum(momentum=0.5)
        >>> state = memory.init([("w", torch.zeros(2))])
        >>> for g in ([4.0, -1.0], [-2.0, -1.0]):
        ...     x = memory.compensate(state, "w", torch.tensor(g)).clone()
        ...     memory.commit(state)
        >>> x
        tensor([ 0.0000, -0.7500])
    """

    has_momentum: ClassVar[bool] = True

    momentum: float = 0.9

    def __post_init__(self) -> None:
        require(
            isinstance(self.momentum, (int, float)) and 0 <= self.momentum < 1,
            f"LocalMomentum: momentum must be at least 0 and below 1, got {self.momentum!r}",
        )

    def init(self, tensors: NamedTensors, dense: NamedTensors = ()) -> LocalMomentumState:
        return LocalMomentumState(_pairs(tensors), _pairs(dense), zeros_like_flat(tensors))

    def is_shared(self, key: str, saved: Mapping[str, Tensor]) -> bool:
        return key.endswith(".mean_momentum")

    def compensate(self, state: LocalMomentumState, name: str, gradient: Tensor, scale: float = 1.0) -> Tensor:
        self._move(state.own[name], gradient, scale)
        return state.sent[name].copy_(state.own[name].spare)

    def decoded(
        self, state: LocalMomentumState, name: str, mean: Tensor, scale: float = 1.0, encoded: bool = True
    ) -> None:
        """The momentum of the mean of a tensor that travelled dense."""
        if not encoded:
            pair = state.shared.get(name) or state.own[name]
            self._move(pair, mean, scale)
            mean.copy_((pair.spare * scale).view(mean.shape))

    def commit(self, state: LocalMomentumState) -> None:
        for pair in state.pairs().values():
            pair.commit()

    def discard(self, state: LocalMomentumState) -> None:
        for pair in state.pairs().values():
            pair.is_pending = False

    def _move(self, pair: Pair, gradient: Tensor, scale: float) -> None:
        flat = gradient.detach().reshape(-1).float()
        torch.add(pair.kept * self.momentum, flat, alpha=(1 - self.momentum) / scale, out=pair.spare)
        pair.is_pending = True


def _pairs(tensors: NamedTensors) -> dict[str, Pair]:
    kept, spare = zeros_like_flat(tensors), zeros_like_flat(tensors)
    return {name: Pair(kept[name], spare[name]) for name in kept}
