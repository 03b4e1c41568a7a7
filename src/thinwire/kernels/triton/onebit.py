"""Signs with two means per bucket in Triton: sums of blocks, the means of each bucket, then the signs."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .. import onebit as family
from ..checks import MAX_SEGMENT_NUMEL
from ..flags import Flag
from .block_sums import BUCKET_NUMEL, BUCKET_SIGNATURE, block_sums, find_bucket, total_of
from .device import one_nan, store_floats
from .launch import are_aligned, launch
from .signs import decode_signs, encode_signs
from .variants import Variant, add_variant


@family._encode.runs_on("triton")
def encode(xs: list[Tensor], out: Tensor, bucket_size: int, residuals: list[Tensor] | None) -> None:
    blocks = block_sums(xs, out.device, "halves", bucket_size)
    arguments = (blocks.rows, blocks.sums, out, len(xs), blocks.num_blocks)
    constants = {"BUCKET": bucket_size, "ALIGNED": are_aligned(out)}
    launch(_store_means, blocks.num_buckets, out.device, *arguments, **constants)
    encode_signs(xs, out, residuals, bucket_size, two=True)


@family._decode_add.runs_on("triton")
def decode_add(payload: Tensor, outs: list[Tensor], weight: float, bucket_size: int) -> None:
    decode_signs([payload], outs, weight, bucket_size, two=True, add=True)


@family._decode_sum.runs_on("triton")
def decode_sum(payloads: list[Tensor], outs: list[Tensor], weight: float, bucket_size: int) -> Flag:
    return decode_signs(payloads, outs, weight, bucket_size, two=True, add=False)


@triton.jit(do_not_specialize=["num_segments", "num_blocks"])
def _store_means(
    rows,
    sums,
    payload,
    num_segments,
    num_blocks,
    BUCKET: tl.constexpr,
    ALIGNED: tl.constexpr,
):
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


add_variant(
    Variant(
        "onebit.encode: means",
        _store_means,
        {"BUCKET": MAX_SEGMENT_NUMEL, "ALIGNED": True},
        BUCKET_SIGNATURE,
        BUCKET_NUMEL,
        24 / 1024,
        launches=3,
    )
)
