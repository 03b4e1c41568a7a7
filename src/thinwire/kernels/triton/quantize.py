"""Quantization to evenly spaced levels in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .. import quantize as family
from ..flags import Flag
from ..quantize import Quantizer
from ..random import keys_on
from ..scales import MAX_SCALE, MIN_SCALE, MIN_SCALE_WIDE
from .block_sums import store_scales
from .buckets import (
    SIGNATURE,
    add_decoder_variants,
    bucket_rows,
    find_scales,
    find_tile,
    first_code,
    launch_decoder,
    load_total,
    scales_of_rows,
    store_tile,
    store_total,
)
from .device import is_finite, load_codes, load_floats, position_of, store_floats, uniform
from .launch import are_aligned, launch
from .tiles import Tiles
from .variants import Variant, add_variant


@family._encode.runs_on("triton")
def encode(
    xs: list[Tensor], out: Tensor, keys: list[int], quantizer: Quantizer, residuals: list[Tensor] | None
) -> None:
    device, tiles, least = out.device, Tiles.of_elements(quantizer.bucket_size), _least_scale(quantizer.num_steps)
    if tiles.size != quantizer.bucket_size:
        store_scales(xs, out, quantizer.bucket_size, quantizer.norm, least)
    rows, num_tiles = bucket_rows(xs, residuals, device, tiles, quantizer.bits, quantizer.bucket_size)
    launch(
        _encode_buckets,
        num_tiles,
        device,
        *(rows, keys_on(keys, device), out, len(xs)),
        BITS=quantizer.bits,
        STEPS=quantizer.num_steps,
        LEAST=least,
        MOST=MAX_SCALE / 2,
        L2=quantizer.norm == "l2",
        BUCKET=quantizer.bucket_size,
        RESIDUAL=residuals is not None,
        ALIGNED=are_aligned(out),
        **tiles.constants,
    )


def _least_scale(num_steps: int) -> float:
    return MIN_SCALE_WIDE if num_steps > 255 else MIN_SCALE


@family._decode_add.runs_on("triton")
def decode_add(payload: Tensor, outs: list[Tensor], weight: float, quantizer: Quantizer) -> None:
    _decode_payloads([payload], outs, weight, quantizer, add=True)


@family._decode_sum.runs_on("triton")
def decode_sum(payloads: list[Tensor], outs: list[Tensor], weight: float, quantizer: Quantizer) -> Flag:
    return _decode_payloads(payloads, outs, weight, quantizer, add=False)


def _decode_payloads(
    payloads: list[Tensor], outs: list[Tensor], weight: float, quantizer: Quantizer, add: bool
) -> Flag:
    tiles = Tiles.of_elements(quantizer.bucket_size)
    rows = bucket_rows(outs, None, payloads[0].device, tiles, quantizer.bits, quantizer.bucket_size)
    constants = {"BITS": quantizer.bits, "STEPS": quantizer.num_steps, "BUCKET": quantizer.bucket_size}
    return launch_decoder(_decode, rows, payloads, outs, weight, add, {**constants, **tiles.constants})


@triton.jit(do_not_specialize=["num_segments"])
def _encode_buckets(
    rows,
    key_table,
    payload,
    num_segments,
    BITS: tl.constexpr,
    STEPS: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    L2: tl.constexpr,
    BUCKET: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ALIGNED: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Find the scales if rows are buckets, quantize, pack, and write the residual in one pass."""
    segment, first_row, start, pointer, numel, offset, inside = find_tile(rows, num_segments, SIZE, WIDTH, ROWS)
    index, has_scale = find_scales(
        rows, num_segments, segment, first_row, start, numel, offset, inside, BUCKET, SIZE, ROWS
    )
    x = tl.load(pointer + offset, mask=inside, other=0.0)
    if SIZE == BUCKET:
        scale = scales_of_rows(pointer, x, numel, payload, index, has_scale, LEAST, L2, ALIGNED, SIZE, WIDTH, ROWS)
    else:
        scale = load_floats(payload, index, has_scale, ALIGNED)
    if STEPS == 1:  # a step is twice the scale: where that overflows, so may the residual
        scale = tl.where(scale > MOST, float("inf"), scale)
        store_floats(payload, index, scale, has_scale, ALIGNED)
    u = uniform(tl.load(key_table + segment), position_of(start, offset))
    codes, value = quantize(x, scale, u, STEPS)
    arguments = (rows, payload, num_segments, segment, start, numel, offset, inside, codes, x - value)
    store_tile(*arguments, BITS, RESIDUAL, SIZE, WIDTH, ROWS)


@triton.jit
def quantize(x, scale, u, STEPS: tl.constexpr):
    """Codes (int32) and values of elements; `kernels.quantize._quantize_segment`."""
    steps = tl.full(scale.shape, STEPS, tl.float32)
    usable = is_finite(scale) & (scale > 0)
    t = (x * tl.div_rn(steps, scale) + STEPS) * 0.5
    codes = tl.where(usable, t + u, 0.0).to(tl.int32)
    codes = tl.minimum(tl.maximum(codes, 0), STEPS)
    return codes, (2 * codes - STEPS).to(tl.float32) * tl.div_rn(scale, steps)


@triton.jit(do_not_specialize=["num_segments", "num_payloads"])
def _decode(
    rows,
    payloads,
    flag,
    num_segments,
    num_payloads,
    weight,
    BITS: tl.constexpr,
    STEPS: tl.constexpr,
    BUCKET: tl.constexpr,
    ADD: tl.constexpr,
    ALIGNED: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Add the first payload to a tile, or overwrite it with the sum of all payloads in their order."""
    segment, first_row, start, pointer, numel, offset, inside = find_tile(rows, num_segments, SIZE, WIDTH, ROWS)
    index, has_scale = find_scales(
        rows, num_segments, segment, first_row, start, numel, offset, inside, BUCKET, SIZE, ROWS
    )
    first_byte = first_code(rows, num_segments, segment, start, BITS)
    total = load_total(pointer + offset, inside, ADD)
    for i in range(1 if ADD else num_payloads):
        payload = tl.load(payloads + i).to(tl.pointer_type(tl.uint8))
        codes = load_codes(payload + first_byte, (numel * BITS + 7) // 8, BITS, SIZE, WIDTH, ROWS)
        scale = load_floats(payload, index, has_scale, ALIGNED)
        step = tl.div_rn(scale, tl.full(scale.shape, STEPS, tl.float32)) * weight
        value = (2 * codes - STEPS).to(tl.float32) * step
        if ADD:
            total += value
        else:
            total = tl.where(i == 0, value, total + value)  # 0 + -0 would lose the sign
    store_total(pointer + offset, inside, total, flag, ADD)


# ---- what is compiled and counted without a GPU ----


def _add_variants(bits: int, bucket_size: int, norm: str, residual: bool, decode: bool = True) -> None:
    tiles, l2 = Tiles.of_elements(bucket_size), norm == "l2"
    has_rows = tiles.size == bucket_size
    constants = {"BITS": bits, "STEPS": 2**bits - 1, "BUCKET": bucket_size, **tiles.constants}
    code_bytes = bits / 8 + 4 / bucket_size
    what = f"{bits} bits, buckets of {bucket_size}"
    add_variant(
        Variant(
            f"quantize.encode: {what}, {norm}{', residual' if residual else ''}",
            _encode_buckets,
            {**constants, "LEAST": MIN_SCALE, "MOST": MAX_SCALE / 2, "L2": l2, "RESIDUAL": residual, "ALIGNED": True},
            SIGNATURE,
            tiles.numel,
            least_bytes=4 + code_bytes + 4 * residual,
            # An L2 scale reads the elements twice; scales of large buckets are read for each element.
            cached_bytes=4.0 if l2 or not has_rows else 0.0,
            launches=1 if has_rows else 3,
            loop_trips=min(32, tiles.width // 32),
        )
    )
    if decode:
        add_decoder_variants("quantize", what, _decode, constants, tiles.numel, code_bytes)


_add_variants(4, 512, "max", residual=False, decode=False)
_add_variants(4, 512, "max", residual=True)
_add_variants(4, 512, "l2", residual=True, decode=False)
_add_variants(8, 512, "max", residual=True)
_add_variants(3, 1000, "max", residual=True)
_add_variants(2, 2048, "l2", residual=False, decode=False)
_add_variants(4, 16384, "max", residual=True, decode=False)
