"""Momentum of each worker's own gradients, which is what is sent: Signum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..membership import config
from .base import NamedTensors, zeros_like_flat
from .momentum import Momentum, MomentumState, Pair, pairs


@dataclass
class LocalMomentumState(MomentumState):
    """What `LocalMomentum` keeps.

    Args:
        sent: the values to send; after encoding, what the payload did not carry, which is dropped.
    """

    sent: dict[str, Tensor] = config()


@dataclass(frozen=True, repr=False)
class LocalMomentum(Momentum):
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

    def init(self, tensors: NamedTensors, dense: NamedTensors = ()) -> LocalMomentumState:
        return LocalMomentumState(pairs(tensors), pairs(dense), sent=zeros_like_flat(tensors))

    def compensate(self, state: LocalMomentumState, name: str, gradient: Tensor, scale: float = 1.0) -> Tensor:
        state.pending.append(state.momentum[name])
        # A copy: encoding overwrites what it is given with the residual, and u must stay.
        return state.sent[name].copy_(self._update(state.momentum[name], gradient.detach().reshape(-1).float(), scale))

    def _update(self, u: Pair, gradient: Tensor, scale: float) -> Tensor:
        return torch.add(u.kept * self.momentum, gradient, alpha=(1 - self.momentum) / scale, out=u.spare)
