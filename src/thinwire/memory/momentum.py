"""Momentum correction: momentum is applied before gradients accumulate, so that late gradients keep their weight.

Each worker keeps a momentum u and a velocity v for every encoded tensor, and sends from the velocity:

    plain       u = m u + g          v = v + u
    Nesterov    u = m (u + g)        v = v + u + g

Afterwards v keeps what was not sent. With masking, u = 0 at every coordinate that was sent. A tensor that travels dense
keeps only u: with g the mean over workers, its update is u (plain) or u + g (Nesterov). So the optimizer that gets the
result must not apply momentum.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .. import kernels
from ..codec import Selection
from ..membership import Form, State, load_tensors, own, pending, shared
from ..options import require_number
from .base import Memory, NamedTensors, zeros_like_flat


@dataclass
class Pair:
    """A committed flat float32 buffer, and the buffer that the next commit swaps in."""

    # Not updated in place: `(u - g) / m` is not the old u in floats, so a discarded round would leave a trace.
    kept: Tensor
    spare: Tensor

    def swap(self) -> None:
        """Keep what was written to the spare buffer."""
        self.kept, self.spare = self.spare, self.kept


def pairs(tensors: NamedTensors) -> dict[str, Pair]:
    """Buffers of zeros for each tensor."""
    kept, spare = zeros_like_flat(tensors), zeros_like_flat(tensors)
    return {name: Pair(kept[name], spare[name]) for name in kept}


def _load_pairs(state: State, loaded: dict[str, Pair], saved: Mapping[str, Tensor]) -> dict[str, Pair]:
    load_tensors({name: pair.kept for name, pair in loaded.items()}, saved, "momentum")
    return loaded


# Spare buffers are not saved: a round writes them before it reads them.
PAIRS = Form(lambda state, pairs: {name: pair.kept.clone() for name, pair in pairs.items()}, _load_pairs)
"""The committed buffers, by parameter name."""


@dataclass
class MomentumState(State):
    """What a memory with momentum keeps, by parameter name, in unscaled units.

    Args:
        momentum: u of the tensors that are encoded.
        mean_momentum: u of the mean of those that travel dense.
        pending: those whose spare buffer was written since the last commit.
    """

    momentum: dict[str, Pair] = own(form=PAIRS)
    mean_momentum: dict[str, Pair] = shared(form=PAIRS)
    pending: list[Pair] = pending(default_factory=list, kw_only=True)


@dataclass(frozen=True, repr=False)
class Momentum(Memory):
    """A memory that applies momentum: to each worker's own gradients, or to the mean of tensors that travel dense."""

    has_momentum: ClassVar[bool] = True

    momentum: float = 0.9

    def __post_init__(self) -> None:
        require_number(f"{type(self).__name__}: momentum", self.momentum, least=0, below=1)

    @abstractmethod
    def _update(self, u: Pair, gradient: Tensor, scale: float) -> Tensor:
        """Write the new momentum into the spare buffer of u; return the unscaled update."""

    def decoded(self, state: MomentumState, name: str, mean: Tensor, scale: float = 1.0, encoded: bool = True) -> None:
        """Apply momentum to the mean of a tensor that travelled dense."""
        if encoded:
            return
        # Under a lossless codec, tensors that are usually encoded travel dense too.
        u = state.mean_momentum.get(name) or state.momentum[name]
        update = self._update(u, mean.reshape(-1).float(), scale)
        state.pending.append(u)
        # Momentum is unscaled, and the result has the loss scale that `mean` came with.
        mean.copy_((update * scale).view_as(mean))

    def commit(self, state: MomentumState) -> None:
        for pair in state.pending:
            pair.swap()
        state.pending.clear()


@dataclass
class CorrectionState(MomentumState):
    """What `MomentumCorrection` keeps.

    Args:
        velocity: v of the tensors that are encoded.
    """

    velocity: dict[str, Pair] = own(form=PAIRS)


@dataclass(frozen=True, repr=False)
class MomentumCorrection(Momentum):
    """Sends `C(v)` of the velocity `v = v + u`, `u = m u + g`, and keeps the rest: Deep Gradient Compression.

    With Nesterov's momentum, `u = m (u + g)` and `v = v + u + g`. A gradient that waits in v gains the same momentum as
    it would in the parameters. Tensors that travel dense get ordinary momentum on the averaged gradient instead, and so
    do all tensors under a lossless codec; v then stays as it is. Check: a lossless codec, or `masking=False` with
    everything sent, is momentum SGD.

    The optimizer must have no momentum of its own; under `compress_gradients` its step raises an error if it has. It
    costs four float32 copies of what is encoded: u and v, committed and pending.

    Args:
        momentum: m, in [0, 1).
        nesterov: whether to use Nesterov's momentum.
        masking: whether u becomes 0 at every coordinate that was sent, which stops stale momentum. A codec such as
            `QSGD` sends every coordinate, so it would clear all of u: use `masking=False` with it.

    Raises:
        ValueError: a value out of range.

    Source: Lin et al. 2018, Deep Gradient Compression, arXiv 1712.01887.

    Example:
        >>> import torch, thinwire as tw
        >>> memory, codec = tw.MomentumCorrection(momentum=0.5, masking=False), tw.TopK(ratio=0.5)
        >>> state = memory.init([("w", torch.zeros(2))])
        >>> for _ in range(2):
        ...     x = memory.compensate(state, "w", torch.tensor([3.0, 1.0]))
        ...     payload = codec.encode(x, residual=x)
        ...     memory.commit(state)
        >>> codec.decode(payload, 2), state.velocity["w"].kept
        (tensor([4.5000, 0.0000]), tensor([0.0000, 2.5000]))
    """

    nesterov: bool = False
    masking: bool = True

    @property
    def needs_support(self) -> bool:
        return self.masking

    def init(self, tensors: NamedTensors, dense: NamedTensors = ()) -> CorrectionState:
        return CorrectionState(pairs(tensors), pairs(dense), velocity=pairs(tensors))

    def compensate(self, state: CorrectionState, name: str, gradient: Tensor, scale: float = 1.0) -> Tensor:
        (x,), _ = self.compensate_all(state, [(name, gradient)], scale)
        return x

    def compensate_all(
        self, state: CorrectionState, tensors: NamedTensors, scale: float = 1.0, counts: list[int] | None = None
    ) -> tuple[list[Tensor], Selection | None]:
        rule = kernels.momentum.Momentum(self.momentum, 1.0 / scale, self.nesterov)
        buffers = self._buffers(state, tensors)
        xs = list(buffers.new_vs)
        if counts:
            return xs, Selection(*kernels.momentum.correct_topk(buffers, rule, counts), counts)
        kernels.momentum.correct(buffers, rule)
        return xs, None

    def masked(self, state: CorrectionState, name: str) -> Tensor:
        # The spare buffer, so that a discarded round leaves u as it was.
        return state.momentum[name].spare

    def _update(self, u: Pair, gradient: Tensor, scale: float) -> Tensor:
        g = gradient / scale
        if self.nesterov:
            return torch.mul(u.kept + g, self.momentum, out=u.spare) + g
        return torch.add(u.kept * self.momentum, g, out=u.spare)

    def _buffers(self, state: CorrectionState, tensors: NamedTensors) -> kernels.momentum.Buffers:
        """Gradients, u and v as flat segments, and the buffers for the new u and v."""
        us, vs = [state.momentum[name] for name, _ in tensors], [state.velocity[name] for name, _ in tensors]
        # Both are swapped by one commit, or neither.
        state.pending += us + vs
        flat = [g.ravel().float() for _, g in tensors]
        return kernels.momentum.Buffers(
            flat, [u.kept for u in us], [v.kept for v in vs], [u.spare for u in us], [v.spare for v in vs]
        )
