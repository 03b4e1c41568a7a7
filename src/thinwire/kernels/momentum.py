"""Momentum correction and error feedback, alone or with the top-k of their result in the same pass.

Source: Deep Gradient Compression, Lin et al., arXiv 1712.01887.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .backend import kernel
from .checks import check_counts, device_of, numels_of, segments, segments_alike
from .scales import float32
from .select import topk_of


@dataclass(frozen=True)
class Momentum:
    """The rule of momentum.

    Args:
        momentum: m; 0 forgets at once.
        factor: of the gradients, such as one over the loss scale.
        nesterov: whether `u' = m (u + g), v' = v + (u' + g)`, else `u' = m u + g, v' = v + u'`.
    """

    momentum: float
    factor: float = 1.0
    nesterov: bool = False


@dataclass(frozen=True)
class Buffers:
    """Segments of gradients g, momenta u and velocities v, and the buffers for the new u and v; none may overlap."""

    gs: Sequence[Tensor]
    us: Sequence[Tensor]
    vs: Sequence[Tensor]
    # Not in place: a discarded step must leave no trace, and in floats (u - g) / m is not the old u.
    new_us: Sequence[Tensor]
    new_vs: Sequence[Tensor]

    def checked(self) -> Buffers:
        """The same, detached; ValueError unless all are segments of the gradients' sizes."""
        device = device_of(self.gs)
        gs = segments("gs", self.gs, device)
        others = {"us": self.us, "vs": self.vs, "new_us": self.new_us, "new_vs": self.new_vs}
        return Buffers(gs, *(segments_alike(name, xs, gs, device, "gradients") for name, xs in others.items()))


def correct(buffers: Buffers, rule: Momentum) -> None:
    """Momentum correction: `u' = m u + g, v' = v + u'`; with Nesterov `u' = m (u + g), v' = v + (u' + g)`.

    Args:
        buffers: read gs, us and vs; write new_us and new_vs.
        rule: m, the factor of the gradients, and which of the two.

    Raises:
        ValueError: if a buffer has the wrong kind or size.

    Example:
        >>> import torch
        >>> new_u, new_v = torch.empty(1), torch.empty(1)
        >>> buffers = Buffers([torch.tensor([1.0])], [torch.tensor([2.0])], [torch.tensor([3.0])], [new_u], [new_v])
        >>> correct(buffers, Momentum(0.5))
        >>> new_u, new_v
        (tensor([2.]), tensor([5.]))
    """
    _correct.on[device_of(buffers.gs).type](buffers.checked(), rule)


def correct_topk(buffers: Buffers, rule: Momentum, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """`correct`, and `select.topk(new_vs, counts)` in the same pass.

    Args:
        buffers, rule: as in `correct`.
        counts: how many of each segment.

    Returns:
        (indices int32, values float32), as from `select.topk`.

    Raises:
        ValueError: if a buffer has the wrong kind or size, or a count exceeds its segment.
    """
    checked = buffers.checked()
    check_counts(counts, numels_of(checked.gs))
    return _correct_topk.on[device_of(buffers.gs).type](checked, rule, list(counts))


def add_topk(
    gs: Sequence[Tensor], es: Sequence[Tensor], outs: Sequence[Tensor], factor: float, counts: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Error feedback: `outs[i] = es[i] + factor * gs[i]`, and `select.topk(outs, counts)` in the same pass.

    Args:
        gs: segments of gradients.
        es: what is added to them, of the same sizes.
        outs: written.
        factor: such as one over the loss scale.
        counts: how many of each segment.

    Returns:
        (indices int32, values float32), as from `select.topk`.

    Raises:
        ValueError: if a buffer has the wrong kind or size, or a count exceeds its segment.

    Example:
        >>> import torch
        >>> out = torch.empty(2)
        >>> add_topk([torch.tensor([1.0, 2.0])], [torch.tensor([0.0, 3.0])], [out], 1.0, [1])
        (tensor([1], dtype=torch.int32), tensor([5.]))
    """
    device = device_of(gs)
    checked = segments("gs", gs, device)
    es = segments_alike("es", es, gs, device, "gradients")
    outs = segments_alike("outs", outs, gs, device, "gradients")
    check_counts(counts, numels_of(gs))
    return _add_topk.on[device.type](checked, es, outs, factor, list(counts))


# ---- the reference ----


@kernel
def _correct(buffers: Buffers, rule: Momentum) -> None:
    b = buffers
    for g, u, v, new_u, new_v in zip(b.gs, b.us, b.vs, b.new_us, b.new_vs, strict=True):
        m, g = float32(rule.momentum, g.device), g * float32(rule.factor, g.device)
        new_u.copy_((u + g) * m if rule.nesterov else u * m + g)
        new_v.copy_(v + (new_u + g if rule.nesterov else new_u))


@kernel
def _correct_topk(buffers: Buffers, rule: Momentum, counts: list[int]) -> tuple[Tensor, Tensor]:
    _correct.reference(buffers, rule)
    return topk_of(list(buffers.new_vs), counts)


@kernel
def _add_topk(
    gs: list[Tensor], es: list[Tensor], outs: list[Tensor], factor: float, counts: list[int]
) -> tuple[Tensor, Tensor]:
    for g, e, out in zip(gs, es, outs, strict=True):
        out.copy_(e + g * float32(factor, g.device))
    return topk_of(outs, counts)
