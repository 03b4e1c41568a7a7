"""Signs and two means per bucket: that of the negative elements and that of the others.

Source: 1-bit SGD, Seide et al. 2014.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import bits as bit
from .backend import kernel
from .checks import MAX_SEGMENT_NUMEL, checked_encoder, checked_payload, checked_payloads, num_buckets, numels_of
from .flags import Flag
from .reduce import sum_payloads
from .scales import float32, rows_of, scale_bytes, split_scales, spread, tree_sum


def nbytes(numels: Sequence[int], bucket_size: int | None = None) -> int:
    """Size of the payload in bytes: two float32 per bucket (per segment for None), then one bit per element.

    Raises:
        ValueError: if `bucket_size` or a segment's size is out of range.

    Example:
        >>> nbytes([1000], bucket_size=512)
        141
    """
    return 8 * num_buckets(numels, bucket_size) + sum((n + 7) // 8 for n in numels)


def encode(
    xs: Sequence[Tensor], out: Tensor, bucket_size: int | None = None, residuals: Sequence[Tensor] | None = None
) -> None:
    """Send each element's sign, and the means of a bucket's negative elements and of its others.

    Args:
        xs: segments of float32.
        out: uint8 of `nbytes(numels, bucket_size)` bytes, written: both means of all buckets, then the signs.
        bucket_size: elements that share two means; None for the whole segment.
        residuals: where given, `x - value` is written here; may be `xs` itself.

    NaN counts as not negative. A non-finite element makes its half of the bucket decode to non-finite values.

    Raises:
        ValueError: if `bucket_size` is out of range or a buffer has the wrong kind or size.

    Example:
        >>> payload = torch.empty(nbytes([4]), dtype=torch.uint8)
        >>> encode([torch.tensor([1.0, -2.0, 3.0, -6.0])], payload)
        >>> out = torch.zeros(4)
        >>> decode_add(payload, [out], 1.0)
        >>> out
        tensor([ 2., -4.,  2., -4.])
    """
    xs, out, residuals = checked_encoder(xs, out, nbytes(numels_of(xs), bucket_size), residuals)
    _encode.on[out.device.type](xs, out, bucket_size or MAX_SEGMENT_NUMEL, residuals)


def decode_add(payload: Tensor, outs: Sequence[Tensor], weight: float, bucket_size: int | None = None) -> None:
    """Add `weight` times the values of a payload to `outs`.

    Raises:
        ValueError: if the payload's size does not fit the segments.
    """
    payload, outs = checked_payload(payload, outs, nbytes(numels_of(outs), bucket_size))
    _decode_add.on[payload.device.type](payload, outs, weight, bucket_size or MAX_SEGMENT_NUMEL)


def decode_sum(
    payloads: Sequence[Tensor], outs: Sequence[Tensor], weight: float, bucket_size: int | None = None
) -> Flag:
    """Overwrite `outs` with the sum of payloads: `decode_add` of each into zeros, on GPUs in one pass over memory.

    Returns:
        Whether the whole result is finite: a `bool` in main memory, elsewhere a flag on the device.

    Raises:
        ValueError: if a payload's size does not fit the segments, or there is no payload.
    """
    checked, outs = checked_payloads(payloads, outs, nbytes(numels_of(outs), bucket_size))
    return _decode_sum.on[checked[0].device.type](checked, outs, weight, bucket_size or MAX_SEGMENT_NUMEL)


# ---- the reference ----


@kernel
def _encode(xs: list[Tensor], out: Tensor, bucket_size: int, residuals: list[Tensor] | None) -> None:
    means, signs = [], []
    for i, x in enumerate(xs):
        pairs = _means(x, bucket_size)
        means.append(pairs.flatten())
        signs.append(bit.pack((x < 0).to(torch.uint8)))
        if residuals is not None:
            low, high = pairs.unbind(-1)
            residuals[i].copy_(x - torch.where(x < 0, spread(low, bucket_size, x), spread(high, bucket_size, x)))
    out.copy_(torch.cat([scale_bytes(means, out.device), *signs]))


@kernel
def _decode_add(payload: Tensor, outs: list[Tensor], weight: float, bucket_size: int) -> None:
    buckets = [-(-x.numel() // bucket_size) for x in outs]
    means, signs = split_scales(payload, 2 * sum(buckets))
    means = means.view(-1, 2) * float32(weight, payload.device)
    for out, mean in zip(outs, bit.split(means, buckets), strict=True):
        segment, signs = signs.tensor_split([(out.numel() + 7) // 8])
        low, high = (spread(m, bucket_size, out) for m in mean.unbind(-1))
        out += torch.where(bit.unpack(segment)[: out.numel()].bool(), low, high)


@kernel
def _decode_sum(payloads: list[Tensor], outs: list[Tensor], weight: float, bucket_size: int) -> Flag:
    return sum_payloads(_decode_add.on[payloads[0].device.type], payloads, outs, weight, bucket_size)


def _means(x: Tensor, bucket_size: int) -> Tensor:
    """(num_buckets, 2): the means of each bucket's negative elements and of its others, 0 where there are none."""
    if x.numel() == 0:
        return torch.empty(0, 2, dtype=torch.float32, device=x.device)
    rows, zero = rows_of(x.double(), bucket_size), torch.zeros((), dtype=torch.float64, device=x.device)
    negative = rows < 0
    # Ones are padded with zeros like the elements, so that padding does not count.
    counts = rows_of(torch.ones_like(x, dtype=torch.float64), bucket_size).sum(-1)
    num_negative = negative.double().sum(-1)
    # The format's sums start at zero, so that -0.0 alone gives 0.0; the last addition does the same.
    sums = tree_sum(torch.where(negative, rows, zero)), tree_sum(torch.where(negative, zero, rows)) + 0.0
    means = [
        torch.where(count == 0, zero, total / count).float()
        for total, count in zip(sums, (num_negative, counts - num_negative), strict=True)
    ]
    return torch.stack(means, -1)
