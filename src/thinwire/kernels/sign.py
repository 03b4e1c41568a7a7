"""Signs and one scale per segment: a bit per element.

Source: EF-SignSGD, Karimireddy et al., arXiv 1901.09847.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import bits as bit
from .backend import kernel
from .checks import check_numels, checked_encoder, checked_payload, checked_payloads, numels_of
from .flags import Flag
from .reduce import sum_payloads
from .scales import float32, scale_bytes, split_scales, tree_sum


def nbytes(numels: Sequence[int]) -> int:
    """Size of the payload in bytes: a float32 scale per segment, then one bit per element, byte aligned per segment.

    Raises:
        ValueError: if a segment's size is out of range.

    Example:
        >>> nbytes([1000, 3])
        134
    """
    check_numels(numels)
    return sum(4 + (n + 7) // 8 for n in numels)


def encode(
    xs: Sequence[Tensor],
    out: Tensor,
    residuals: Sequence[Tensor] | None = None,
    fixed_scale: float | None = None,
) -> None:
    """Send each segment's signs and mean magnitude: `value = -scale if x < 0 else scale`, `scale = |x|_1 / n`.

    Args:
        xs: segments of float32.
        out: uint8 of `nbytes(...)` bytes, written.
        residuals: where given, `x - value` is written here; may be `xs` itself.
        fixed_scale: where given, sent as the scale of every segment whose mean magnitude is finite and not zero.

    A non-finite element makes its whole segment decode to non-finite values.

    Raises:
        ValueError: if a buffer has the wrong kind or size.

    Example:
        >>> payload = torch.empty(nbytes([3]), dtype=torch.uint8)
        >>> encode([torch.tensor([1.0, -2.0, 3.0])], payload)
        >>> out = torch.zeros(3)
        >>> decode_add(payload, [out], 1.0)
        >>> out
        tensor([ 2., -2.,  2.])
    """
    xs, out, residuals = checked_encoder(xs, out, nbytes(numels_of(xs)), residuals)
    _encode.on[out.device.type](xs, out, residuals, fixed_scale)


def decode_add(payload: Tensor, outs: Sequence[Tensor], weight: float) -> None:
    """Add `weight` times the values of a payload to `outs`.

    Raises:
        ValueError: if the payload's size does not fit the segments.
    """
    payload, outs = checked_payload(payload, outs, nbytes(numels_of(outs)))
    _decode_add.on[payload.device.type](payload, outs, weight)


def decode_sum(payloads: Sequence[Tensor], outs: Sequence[Tensor], weight: float) -> Flag:
    """Overwrite `outs` with the sum of payloads: `decode_add` of each into zeros, on GPUs in one pass over memory.

    Returns:
        Whether the whole result is finite: a `bool` in main memory, elsewhere a flag on the device.

    Raises:
        ValueError: if a payload's size does not fit the segments, or there is no payload.
    """
    checked, outs = checked_payloads(payloads, outs, nbytes(numels_of(outs)))
    return _decode_sum.on[checked[0].device.type](checked, outs, weight)


# ---- the reference ----


@kernel
def _encode(xs: list[Tensor], out: Tensor, residuals: list[Tensor] | None, fixed_scale: float | None) -> None:
    scales, signs = [], []
    for i, x in enumerate(xs):
        scale = _mean_magnitude(x)
        if fixed_scale is not None:
            scale = torch.where(scale.isfinite() & (scale > 0), torch.full_like(scale, fixed_scale), scale)
        signs.append(bit.pack((x < 0).to(torch.uint8)))
        scales.append(scale)
        if residuals is not None:
            residuals[i].copy_(x - torch.where(x < 0, -scale, scale))
    out.copy_(torch.cat([scale_bytes(scales, out.device), *signs]))


@kernel
def _decode_add(payload: Tensor, outs: list[Tensor], weight: float) -> None:
    scales, signs = split_scales(payload, len(outs))
    for out, value in zip(outs, scales * float32(weight, payload.device), strict=True):
        segment, signs = signs.tensor_split([(out.numel() + 7) // 8])
        out += torch.where(bit.unpack(segment)[: out.numel()].bool(), -value, value)


@kernel
def _decode_sum(payloads: list[Tensor], outs: list[Tensor], weight: float) -> Flag:
    return sum_payloads(_decode_add.on[payloads[0].device.type], payloads, outs, weight)


def _mean_magnitude(x: Tensor) -> Tensor:
    if x.numel() == 0:
        return torch.zeros(1, dtype=torch.float32, device=x.device)
    return (tree_sum(x.abs()) / torch.full((1,), x.numel(), dtype=torch.float64, device=x.device)).float()
