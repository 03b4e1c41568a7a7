"""Scales of buckets in plain PyTorch, for the references.

Every operation is rounded as written: divisions are between tensors (PyTorch multiplies by a reciprocal for scalars),
sums have a fixed order, and nothing is fused. So every backend can give the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .bits import pad

MIN_SCALE = 2.0**-118  # below this, 255 / scale could overflow
MIN_SCALE_WIDE = 2.0**-110  # below this, 65535 / scale could overflow
MAX_SCALE = float.fromhex("0x1.fffp127")  # so that (scale / num_steps) * num_steps stays finite
SUM_BLOCK, SUM_LANES = 1024, 32
_MAGNITUDE = 0x7FFFFFFF


def float32(value: float | Sequence[float], device: torch.device) -> Tensor:
    """A constant as a float32 tensor; a number is written by the device itself, without an upload."""
    if isinstance(value, (int, float)):
        return torch.full((), value, dtype=torch.float32, device=device)
    return torch.tensor(value, dtype=torch.float32, device=device)


def magnitude(x: Tensor) -> Tensor:
    """The bits of |x| as int32. As integers, NaN > infinity > finite on every device."""
    return x.view(torch.int32) & _MAGNITUDE


def _halve(t: Tensor) -> Tensor:
    """Sum the last dimension, a power of two long, by adding its second half to its first until one is left."""
    while t.shape[-1] > 1:
        half = t.shape[-1] // 2
        t = t[..., :half] + t[..., half:]
    return t[..., 0]


def tree_sum(x: Tensor) -> Tensor:
    """Sum of the last dimension (not empty) in float64, in a fixed order.

    In each block of 1024, element i is added to lane `i mod 32` in order of i; the lanes are then summed by halving,
    and so are the blocks' sums, padded with zeros to a power of two.
    """
    rows = pad(x.double(), SUM_BLOCK).unflatten(-1, (-1, SUM_BLOCK // SUM_LANES, SUM_LANES))
    lanes = rows[..., 0, :]
    for i in range(1, rows.shape[-2]):
        lanes = lanes + rows[..., i, :]
    sums = _halve(lanes)
    return _halve(pad(sums, 1 << (sums.shape[-1] - 1).bit_length()))


def root(sums: Tensor) -> Tensor:
    """The smallest float32 whose square is at least the sum. Squares are exact, so square roots need not be."""
    # `torch.sqrt` of float64 is not always correctly rounded. One step up or down mends that.
    roots = sums.sqrt().float()
    roots = torch.where(roots.double() ** 2 < sums, _neighbour(roots, 1), roots)
    below = _neighbour(roots, -1)
    return torch.where(below.double() ** 2 >= sums, below, roots)


def _neighbour(x: Tensor, ulps: int) -> Tensor:
    return (x.view(torch.int32) + ulps).view(torch.float32)


def rows_of(x: Tensor, bucket_size: int) -> Tensor:
    """Buckets as rows, padded with zeros; `bucket_size` may exceed the segment."""
    size = min(bucket_size, max(1, x.numel()))
    return pad(x, size).view(-1, size)


def bucket_scales(x: Tensor, bucket_size: int, norm: str, least: float = MIN_SCALE) -> Tensor:
    """The scale of each bucket of a segment, as it is stored; scales below `least` become 0."""
    if x.numel() == 0:
        return x
    rows = rows_of(x, bucket_size)
    if norm == "max":
        scales = magnitude(rows).amax(-1).view(torch.float32)
        # Infinity must stay, so that the bucket decodes to numbers that are not finite.
        scales = torch.where(scales.isfinite(), scales.clamp(max=MAX_SCALE), scales)
    else:
        # In float64, squares of float32 numbers are exact.
        sums = tree_sum(rows.double() * rows.double())
        scales = torch.where(sums.isfinite(), root(sums).clamp(max=MAX_SCALE), sums.float())
    return torch.where(scales < least, torch.zeros_like(scales), scales)


def spread(scales: Tensor, bucket_size: int, x: Tensor) -> Tensor:
    """The scale of every element of `x`."""
    # `bucket_size` may be far above the segment's size: 2^31 - 1 stands for the whole of it.
    return scales.repeat_interleave(min(bucket_size, x.numel()))[: x.numel()]


def scale_bytes(scales: Sequence[Tensor], device: torch.device) -> Tensor:
    """Float32 scales as bytes, with one NaN for all NaNs."""
    flat = torch.cat([torch.empty(0, dtype=torch.float32, device=device), *scales])
    return torch.where(flat.isnan(), torch.full_like(flat, float("nan")), flat).view(torch.uint8)


def split_scales(payload: Tensor, num_scales: int) -> tuple[Tensor, Tensor]:
    """The scales at the start of a payload, and the bytes after them."""
    # A copy, because a payload may start at any address.
    return payload[: 4 * num_scales].clone().view(torch.float32), payload[4 * num_scales :]
