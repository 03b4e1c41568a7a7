"""Signs with a mean magnitude in Triton: sums of blocks, one number per segment, then the signs."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .. import sign as family
from ..checks import MAX_SEGMENT_NUMEL
from ..flags import Flag
from .block_sums import BUCKET_NUMEL, BUCKET_SIGNATURE, block_sums, find_bucket, total_of
from .device import is_finite, one_nan, store_floats
from .launch import are_aligned, launch
from .signs import decode_signs, encode_signs
from .variants import Variant, add_variant


@family._encode.runs_on("triton")
def encode(xs: list[Tensor], out: Tensor, residuals: list[Tensor] | None, fixed_scale: float | None) -> None:
    blocks = block_sums(xs, out.device, "magnitudes", least_buckets=1)
    arguments = (blocks.rows, blocks.sums, out, len(xs), fixed_scale or 0.0)
    constants = {"FIXED": fixed_scale is not None, "BUCKET": MAX_SEGMENT_NUMEL, "ALIGNED": are_aligned(out)}
    launch(_store_means, len(xs), out.device, *arguments, **constants)
    encode_signs(xs, out, residuals, MAX_SEGMENT_NUMEL, two=False)


@family._decode_add.runs_on("triton")
def decode_add(payload: Tensor, outs: list[Tensor], weight: float) -> None:
    decode_signs([payload], outs, weight, MAX_SEGMENT_NUMEL, two=False, add=True)


@family._decode_sum.runs_on("triton")
def decode_sum(payloads: list[Tensor], outs: list[Tensor], weight: float) -> Flag:
    return decode_signs(payloads, outs, weight, MAX_SEGMENT_NUMEL, two=False, add=False)


@triton.jit(do_not_specialize=["num_segments"])
def _store_means(
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


add_variant(
    Variant(
        "sign.encode: mean",
        _store_means,
        {"FIXED": False, "BUCKET": MAX_SEGMENT_NUMEL, "ALIGNED": True},
        BUCKET_SIGNATURE,
        BUCKET_NUMEL,
        8 / 1024,
        launches=3,
    )
)
