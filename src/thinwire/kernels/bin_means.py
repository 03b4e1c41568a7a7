"""A few bits per element, and the mean of each bin of a bucket: each bit splits every bin at its mean, the first at zero."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import debug
from . import bits as bit
from . import words
from .backend import kernel
from .checks import MAX_SEGMENT_NUMEL, checked_encoder, checked_payload, num_buckets, numels_of
from .scales import float32, scale_bytes, split_scales

LANES = 8


def nbytes(numels: Sequence[int], bits: int, bucket_size: int | None = None) -> int:
    """Size of the payload in bytes: 2^bits float32 per bucket (per segment for None), then `bits` bits per element.

    Raises:
        ValueError: if `bucket_size` or a segment's size is out of range.

    Example:
        >>> nbytes([1000], bits=2, bucket_size=512)
        282
    """
    return (4 << bits) * num_buckets(numels, bucket_size) + sum(words.nbytes(n, bits) for n in numels)


def encode(
    xs: Sequence[Tensor],
    out: Tensor,
    bits: int,
    bucket_size: int | None = None,
    residuals: Sequence[Tensor] | None = None,
) -> None:
    """Send each element's bin, and the means of all bins.

    Args:
        xs: segments of float32.
        out: uint8 of `nbytes(numels, bits, bucket_size)` bytes, written: the means of all buckets, then the bins.
        bits: 1 to 8.
        bucket_size: elements that share the bins; None for the whole segment.
        residuals: where given, `x - mean` is written here; may be `xs` itself.

    NaN goes to the lower bin. The mean of a bin with an element that is not finite is not finite.

    Raises:
        ValueError: if `bucket_size` is out of range or a buffer has the wrong kind or size.

    Example:
        >>> payload = torch.empty(nbytes([5], bits=2), dtype=torch.uint8)
        >>> encode([torch.tensor([1.0, 2.0, 9.0, -4.0, -4.0])], payload, bits=2)
        >>> out = torch.zeros(5)
        >>> decode_add(payload, [out], 1.0, bits=2)
        >>> out
        tensor([ 1.5000,  1.5000,  9.0000, -4.0000, -4.0000])
    """
    xs, out, residuals = checked_encoder(xs, out, nbytes(numels_of(xs), bits, bucket_size), residuals)
    _encode.on[out.device.type](xs, out, bits, bucket_size or MAX_SEGMENT_NUMEL, residuals)


def decode_add(
    payload: Tensor, outs: Sequence[Tensor], weight: float, bits: int, bucket_size: int | None = None
) -> None:
    """Add `weight` times the values of a payload to `outs`.

    Raises:
        ValueError: if the payload's size does not fit the segments.
    """
    payload, outs = checked_payload(payload, outs, nbytes(numels_of(outs), bits, bucket_size))
    _decode_add.on[payload.device.type](payload, outs, weight, bits, bucket_size or MAX_SEGMENT_NUMEL)


# ---- the reference ----


@kernel
def _encode(xs: list[Tensor], out: Tensor, bits: int, bucket_size: int, residuals: list[Tensor] | None) -> None:
    all_means, codes = [], []
    for i, x in enumerate(xs):
        bins, means = _split(x, bits, bucket_size)
        packed = debug.empty(words.nbytes(x.numel(), bits), dtype=torch.uint8, device=x.device)
        words.encode((bins % (1 << bits)).to(torch.int32), [x.numel()], bits, packed)
        all_means.append(means)
        codes.append(packed)
        if residuals is not None:
            torch.sub(x, means[bins], out=residuals[i])
    out.copy_(torch.cat([scale_bytes(all_means, out.device), *codes]))


@kernel
def _decode_add(payload: Tensor, outs: list[Tensor], weight: float, bits: int, bucket_size: int) -> None:
    counts = [num_buckets([out.numel()], bucket_size) << bits for out in outs]
    means, codes = split_scales(payload, sum(counts))
    sizes = [words.nbytes(out.numel(), bits) for out in outs]
    for out, values, packed in zip(
        outs, bit.split(means * float32(weight, payload.device), counts), bit.split(codes, sizes), strict=True
    ):
        bins = words.decode(packed, [out.numel()], bits).long()
        place = torch.arange(out.numel(), device=out.device)
        out += values[bins + (place // bucket_size << bits)]


def _split(x: Tensor, bits: int, bucket_size: int) -> tuple[Tensor, Tensor]:
    """The bin of each element, counted over all buckets, and the float32 mean of every bin."""
    place = torch.arange(x.numel(), device=x.device)
    bins, lanes = place // bucket_size, place % bucket_size % LANES
    count = num_buckets([x.numel()], bucket_size)
    means = torch.zeros(count, dtype=torch.float32, device=x.device)
    for number in range(1, bits + 1):
        bins = 2 * bins + (x >= means[bins])
        means = _means(x.double(), bins, lanes, count << number)
    return bins, means


def _means(x: Tensor, bins: Tensor, lanes: Tensor, num_bins: int) -> Tensor:
    """The float32 mean of each bin; 0 for an empty one. Sums in float64: element i of a bucket is added to lane i mod 8, then
    the lanes are halved."""
    sums, counts = (torch.zeros(num_bins * LANES, dtype=torch.float64, device=x.device) for _ in range(2))
    at = bins * LANES + lanes
    sums.index_add_(0, at, x)
    counts.index_add_(0, at, torch.ones_like(x))
    sums, counts = sums.view(-1, LANES), counts.view(-1, LANES)
    while sums.shape[1] > 1:
        sums = sums[:, : sums.shape[1] // 2] + sums[:, sums.shape[1] // 2 :]
    means: Tensor = (sums[:, 0] / counts.sum(1).clamp(min=1)).float()
    return means
