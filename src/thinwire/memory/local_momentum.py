"""Momentum of each worker's own gradients, which is what is sent: Signum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..membership import State, config, own, pending, shared
from ..options import require_number
from .base import Memory, NamedTensors, zeros_like_flat
from .momentum import PAIRS, Pair, pairs


@dataclass
class LocalMomentumState(State):
    """What `LocalMomentum` keeps by parameter name: flat float32 tensors, in unscaled units.

    Args:
        momentum: u of encoded tensors.
        mean_momentum: u of the mean of dense tensors.
        sent: the values to send; after encoding, what the payload did not carry, which is dropped.
        pending: the buffers of momentum that were written since the last commit.
    """

    momentum: dict[str, Pair] = own(form=PAIRS)
    mean_momentum: dict[str, Pair] = shared(form=PAIRS)
    sent: dict[str, Tensor] = config()
    pending: list[Pair] = pending(default_factory=list)


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
        require_number("LocalMomentum: momentum", self.momentum, least=0, below=1)

    def init(self, tensors: NamedTensors, dense: NamedTensors = ()) -> LocalMomentumState:
        return LocalMomentumState(pairs(tensors), pairs(dense), zeros_like_flat(tensors))

    def compensate(self, state: LocalMomentumState, name: str, gradient: Tensor, scale: float = 1.0) -> Tensor:
        self._move(state, state.momentum[name], gradient, scale)
        # A copy: encoding overwrites what it is given with the residual, and u must stay.
        return state.sent[name].copy_(state.momentum[name].spare)

    def decoded(
        self, state: LocalMomentumState, name: str, mean: Tensor, scale: float = 1.0, encoded: bool = True
    ) -> None:
        """The momentum of the mean of a tensor that travelled dense."""
        if not encoded:
            # Under a lossless codec, tensors that are usually encoded travel dense too.
            pair = state.mean_momentum.get(name) or state.momentum[name]
            self._move(state, pair, mean, scale)
            mean.copy_((pair.spare * scale).view(mean.shape))

    def commit(self, state: LocalMomentumState) -> None:
        for pair in state.pending:
            pair.swap()
        state.pending.clear()

    def _move(self, state: LocalMomentumState, pair: Pair, gradient: Tensor, scale: float) -> None:
        flat = gradient.detach().reshape(-1).float()
        torch.add(pair.kept * self.momentum, flat, alpha=(1 - self.momentum) / scale, out=pair.spare)
        state.pending.append(pair)
