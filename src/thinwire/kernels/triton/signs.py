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
from .block_sums import BUCKET_NUMEL, block_sums, find_bucket, total_of
from .buckets import Coding
from .device import is_finite, negated, one_nan, store_floats
from .launch import are_aligned, launch
from .variants import VARIANTS, Variant


@sign._encode.runs_on("triton")
def encode_signs(xs: list[Tensor], out: Tensor, residuals: list[Tensor] | None, fixed_scale: float | None) -> None:
    blocks = block_sums(xs, out.device, "magnitudes", least_buckets=1)
    arguments = (blocks.rows, blocks.sums, out, len(xs), fixed_scale or 0.0)
    constants = {"FIXED": fixed_scale is not None, "BUCKET": MAX_SEGMENT_NUMEL, "ALIGNED": are_aligned(out)}
    launch(_store_magnitudes, len(xs), out.device, *arguments, **constants)
    SIGN.encode(xs, out, residuals)


@sign._decode_add.runs_on("triton")
def add_signs(payload: Tensor, outs: list[Tensor], weight: float) -> None:
    SIGN.decode([payload], outs, weight, add=True)


@sign._decode_sum.runs_on("triton")
def sum_signs(payloads: list[Tensor], outs: list[Tensor], weight: float) -> Flag:
    return SIGN.decode(payloads, outs, weight, add=False)


@onebit._encode.runs_on("triton")
def encode_halves(xs: list[Tensor], out: Tensor, bucket_size: int, residuals: list[Tensor] | None) -> None:
    blocks = block_sums(xs, out.device, "halves", bucket_size)
    arguments = (blocks.rows, blocks.sums, out, len(xs), blocks.num_blocks)
    constants = {"BUCKET": bucket_size, "ALIGNED": are_aligned(out)}
    launch(_store_means, blocks.num_buckets, out.device, *arguments, **constants)
    _onebit(bucket_size).encode(xs, out, residuals)


@onebit._decode_add.runs_on("triton")
def add_halves(payload: Tensor, outs: list[Tensor], weight: float, bucket_size: int) -> None:
    _onebit(bucket_size).decode([payload], outs, weight, add=True)


@onebit._decode_sum.runs_on("triton")
def sum_halves(payloads: list[Tensor], outs: list[Tensor], weight: float, bucket_size: int) -> Flag:
    return _onebit(bucket_size).decode(payloads, outs, weight, add=False)


@triton.jit(do_not_specialize=["num_segments"])
def _store_magnitudes(
    rows,
    sums,
    payload,
    num_segments,
    fixed_scale,
    FIXED: tl.constexpr,
    BUCKET: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One program per segment: store the mean magnitude, or a fixed scale where it is finite and not zero."""
    _, size, first_block, count = find_bucket(rows, num_segments, BUCKET)
    total = total_of(sums + first_block, count, False)
    scale = (total / tl.maximum(size, 1).to(tl.float64)).to(tl.float32)  # the sum of an empty segment is 0
    if FIXED:
        scale = tl.where(is_finite(scale) & (scale > 0), fixed_scale, scale)
    store_floats(payload, tl.program_id(0), one_nan(scale), True, ALIGNED)


@triton.jit(do_not_specialize=["num_segments", "num_blocks"])
def _store_means(rows, sums, payload, num_segments, num_blocks, BUCKET: tl.constexpr, ALIGNED: tl.constexpr):
    """One program per bucket: store the means of its negative elements and of its others; 0 for none."""
    _, size, first_block, count = find_bucket(rows, num_segments, BUCKET)
    sums += first_block
    low = total_of(sums, count, False)
    high = total_of(sums + num_blocks, count, False)
    negatives = total_of(sums + 2 * num_blocks, count, False)
    others = size.to(tl.float64) - negatives
    low = tl.where(negatives == 0, 0.0, low / tl.maximum(negatives, 1.0))
    high = tl.where(others == 0, 0.0, high / tl.maximum(others, 1.0))
    program = tl.program_id(0)
    store_floats(payload, 2 * program, one_nan(low.to(tl.float32)), True, ALIGNED)
    store_floats(payload, 2 * program + 1, one_nan(high.to(tl.float32)), True, ALIGNED)


@triton.jit
def _low_and_high(first, second, PARAMETERS: tl.constexpr):
    """What negative elements become, and what others become."""
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


_BUCKET = {"BUCKET": MAX_SEGMENT_NUMEL, "ALIGNED": True}
for _family, _coding, _what in (("sign", SIGN, "whole segments"), ("onebit", _onebit(512), "buckets of 512")):
    VARIANTS.append(_coding.encoder_variant(f"{_family}.encode: {_what}, residual", random=False, launches=3))
    VARIANTS.extend(_coding.decoder_variants(f"{_family}.{{}}: {_what}"))
VARIANTS += [
    Variant("sign.encode: mean", _store_magnitudes, {"FIXED": False, **_BUCKET}, BUCKET_NUMEL, 8 / 1024, launches=3),
    Variant("onebit.encode: means", _store_means, _BUCKET, BUCKET_NUMEL, 24 / 1024, launches=3),
]
