"""A bit per element in Triton: `sign`, with a mean magnitude per segment, and `onebit`, with two means per bucket.

One kernel sums blocks, one stores the numbers, and then the signs are packed.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .. import onebit, sign
from ..checks import MAX_SEGMENT_NUMEL
from ..flags import Flag
from .block_sums import store_numbers
from .buckets import Coding
from .device import is_finite, negated


@sign._encode.runs_on("triton")
def encode_signs(xs: list[Tensor], out: Tensor, residuals: list[Tensor] | None, fixed_scale: float | None) -> None:
    parameters, argument = (int(fixed_scale is not None),), fixed_scale or 0.0
    store_numbers(xs, out, "magnitudes", _mean_magnitude, parameters, least_buckets=1, argument=argument)
    SIGN.encode(xs, out, residuals)


@sign._decode_add.runs_on("triton")
def add_signs(payload: Tensor, outs: list[Tensor], weight: float) -> None:
    SIGN.decode([payload], outs, weight, add=True)


@sign._decode_sum.runs_on("triton")
def sum_signs(payloads: list[Tensor], outs: list[Tensor], weight: float) -> Flag:
    return SIGN.decode(payloads, outs, weight, add=False)


@onebit._encode.runs_on("triton")
def encode_halves(xs: list[Tensor], out: Tensor, bucket_size: int, residuals: list[Tensor] | None) -> None:
    store_numbers(xs, out, "halves", _means, (), bucket_size)
    _onebit(bucket_size).encode(xs, out, residuals)


@onebit._decode_add.runs_on("triton")
def add_halves(payload: Tensor, outs: list[Tensor], weight: float, bucket_size: int) -> None:
    _onebit(bucket_size).decode([payload], outs, weight, add=True)


@onebit._decode_sum.runs_on("triton")
def sum_halves(payloads: list[Tensor], outs: list[Tensor], weight: float, bucket_size: int) -> Flag:
    return _onebit(bucket_size).decode(payloads, outs, weight, add=False)


@triton.jit
def _mean_magnitude(total, _second, _third, size, fixed_scale, PARAMETERS: tl.constexpr):
    """The mean magnitude of a segment, or a fixed scale where it is finite and not zero."""
    scale = (total / tl.maximum(size, 1).to(tl.float64)).to(tl.float32)  # the sum of an empty segment is 0
    if PARAMETERS[0]:
        scale = tl.where(is_finite(scale) & (scale > 0), fixed_scale, scale)
    return scale, scale


@triton.jit
def _means(low, high, negatives, size, _argument, _PARAMETERS: tl.constexpr):
    """The means of a bucket's negative elements and of its others; 0 for none."""
    others = size.to(tl.float64) - negatives
    low = tl.where(negatives == 0, 0.0, low / tl.maximum(negatives, 1.0))
    high = tl.where(others == 0, 0.0, high / tl.maximum(others, 1.0))
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _low_and_high(first, second, PARAMETERS: tl.constexpr):
    """The values of negative elements and of others."""
    if PARAMETERS[0] == 2:
        low, high = first, second
    else:
        low, high = negated(first), first
    return low, high


@triton.jit
def _round(x, first, second, _u, _level_table, PARAMETERS: tl.constexpr):
    low, high = _low_and_high(first, second, PARAMETERS)
    return (x < 0).to(tl.int32), tl.where(x < 0, low, high)


@triton.jit
def _value(codes, first, second, weight, _level_table, PARAMETERS: tl.constexpr):
    low, high = _low_and_high(first, second, PARAMETERS)
    return tl.where(codes != 0, low * weight, high * weight)


SIGN = Coding(1, MAX_SEGMENT_NUMEL, _round, _value, (1,), numbers=1, least_buckets=1)


def _onebit(bucket_size: int) -> Coding:
    return Coding(1, bucket_size, _round, _value, (2,), numbers=2)
