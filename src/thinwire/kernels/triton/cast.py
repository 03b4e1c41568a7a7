"""Shorter float types in Triton, in integer arithmetic: Triton's own conversions differ between its interpreter and GPUs."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import cast as family
from ..cast import _NAN, WIDTHS
from ..checks import MAX_SEGMENT_NUMEL
from ..flags import Flag
from .block_sums import BUCKET_NUMEL, BUCKET_SIGNATURE, block_sums, find_bucket, total_of
from .buckets import (
    SIGNATURE,
    add_decoder_variants,
    find_tile,
    first_code,
    launch_decoder,
    load_total,
    segment_rows,
    store_tile,
    store_total,
)
from .device import is_finite, load_codes, load_floats, negated, one_nan, store_floats
from .launch import are_aligned, launch
from .tiles import Tiles
from .variants import Variant, add_variant

MANTISSA = {"bfloat16": 7, "float16": 10, "float8_e4m3fn": 3, "float8_e5m2": 2}  # bits
BIAS = {"bfloat16": 127, "float16": 15, "float8_e4m3fn": 7, "float8_e5m2": 15}  # of exponents
TILES = Tiles.of_elements(MAX_SEGMENT_NUMEL)


@family._encode.runs_on("triton")
def encode(xs: list[Tensor], out: Tensor, dtype: str, residuals: list[Tensor] | None) -> None:
    device, constants = out.device, _constants(dtype) | {"ALIGNED": are_aligned(out)}
    if constants["SCALED"]:
        blocks = block_sums(xs, device, "max", least_buckets=1)
        most = torch.finfo(getattr(torch, dtype)).max
        arguments = (blocks.rows, blocks.sums, out, len(xs))
        launch(
            _store_scales,
            len(xs),
            device,
            *arguments,
            MOST=most,
            BUCKET=MAX_SEGMENT_NUMEL,
            ALIGNED=constants["ALIGNED"],
        )
    rows, num_tiles = _rows(xs, residuals, device, dtype)
    launch(_encode, num_tiles, device, rows, out, len(xs), NAN=_NAN[dtype], RESIDUAL=residuals is not None, **constants)


@family._decode_add.runs_on("triton")
def decode_add(payload: Tensor, outs: list[Tensor], weight: float, dtype: str) -> None:
    _decode_payloads([payload], outs, weight, dtype, add=True)


@family._decode_sum.runs_on("triton")
def decode_sum(payloads: list[Tensor], outs: list[Tensor], weight: float, dtype: str) -> Flag:
    return _decode_payloads(payloads, outs, weight, dtype, add=False)


def _decode_payloads(payloads: list[Tensor], outs: list[Tensor], weight: float, dtype: str, add: bool) -> Flag:
    rows = _rows(outs, None, payloads[0].device, dtype)
    return launch_decoder(_decode, rows, payloads, outs, weight, add, _constants(dtype))


def _rows(xs: list[Tensor], residuals: list[Tensor] | None, device: torch.device, dtype: str) -> tuple[Tensor, int]:
    width = WIDTHS[dtype]
    num_tiles = [TILES.count(x.numel()) for x in xs]
    code_bytes = [width * x.numel() for x in xs]
    return segment_rows(xs, residuals, device, num_tiles, [1] * len(xs), code_bytes, 4 * len(xs) if width == 1 else 0)


def _constants(dtype: str) -> dict[str, Any]:
    return {
        "BITS": 8 * WIDTHS[dtype],
        "MANTISSA": MANTISSA[dtype],
        "BIAS": BIAS[dtype],
        "INFINITE": dtype != "float8_e4m3fn",
        "SCALED": WIDTHS[dtype] == 1,
        **TILES.constants,
    }


@triton.jit(do_not_specialize=["num_segments"])
def _store_scales(rows, sums, payload, num_segments, MOST: tl.constexpr, BUCKET: tl.constexpr, ALIGNED: tl.constexpr):
    """One program per segment: the least power of two by which the segment divided is at most MOST."""
    _, _, first_block, blocks = find_bucket(rows, num_segments, BUCKET)
    largest = total_of(sums + first_block, blocks, True).to(tl.int32).to(tl.float32, bitcast=True)
    bits = tl.div_rn(largest, tl.full([], MOST, tl.float32)).to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 126 - ((bits & 0x7FFFFF) == 0).to(tl.int32)
    exponent = tl.where(bits == 0, 0, tl.minimum(tl.maximum(exponent, -126), 127))
    scale = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    scale = tl.where(is_finite(largest), tl.where(largest > 0, scale, 1.0), largest)
    store_floats(payload, tl.program_id(0), one_nan(scale), True, ALIGNED)


@triton.jit
def narrow(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, BITS: tl.constexpr, NAN: tl.constexpr):
    """The code (int32) of float32 numbers, rounded to nearest even; beyond the range the code of infinity.

    A type without infinity must be given numbers in its range.
    """
    bits = x.to(tl.int32, bitcast=True)
    largest = bits & 0x7FFFFFFF
    SHIFT: tl.constexpr = 23 - MANTISSA
    INFINITY: tl.constexpr = ((1 << (BITS - 1 - MANTISSA)) - 1) << MANTISSA
    # Adding half of the last kept bit, less one if that bit is even, rounds to nearest even; a carry is right, too.
    code = (largest + ((1 << (SHIFT - 1)) - 1) + ((largest >> SHIFT) & 1)) >> SHIFT
    if BIAS != 127:
        code -= (127 - BIAS) << MANTISSA
        # Adding this power of two moves the last bit of a subnormal number to the last bit of a float32.
        MAGIC: tl.constexpr = (127 - BIAS + SHIFT + 1) << 23
        moved = largest.to(tl.float32, bitcast=True) + tl.full([], MAGIC, tl.int32).to(tl.float32, bitcast=True)
        code = tl.where(largest < ((128 - BIAS) << 23), moved.to(tl.int32, bitcast=True) - MAGIC, code)
        if BITS == 16:
            code = tl.minimum(code, INFINITY)
    code = code | ((bits >> (32 - BITS)) & (1 << (BITS - 1)))
    return tl.where(largest > 0x7F800000, NAN, code)


@triton.jit
def widen(code, MANTISSA: tl.constexpr, BIAS: tl.constexpr, BITS: tl.constexpr, INFINITE: tl.constexpr):
    """Undo `narrow`, exactly."""
    ALL: tl.constexpr = (1 << (BITS - 1)) - 1
    largest = code & ALL
    if BIAS == 127:
        x = (largest << (23 - MANTISSA)).to(tl.float32, bitcast=True)
    else:
        # As a float32 its exponent is too small by the difference of the biases. Subnormal numbers stay exact.
        x = (largest << (23 - MANTISSA)).to(tl.float32, bitcast=True) * (2.0 ** (127 - BIAS))
        if INFINITE:
            INFINITY: tl.constexpr = ALL >> MANTISSA << MANTISSA
            special = ((largest << (23 - MANTISSA)) | 0x7F800000).to(tl.float32, bitcast=True)
            x = tl.where(largest >= INFINITY, special, x)
        else:
            x = tl.where(largest == ALL, float("nan"), x)
    return tl.where((code >> (BITS - 1)) != 0, negated(x), x)


@triton.jit(do_not_specialize=["num_segments"])
def _encode(
    rows,
    payload,
    num_segments,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    INFINITE: tl.constexpr,
    SCALED: tl.constexpr,
    NAN: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ALIGNED: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    segment, _, start, pointer, numel, offset, inside = find_tile(rows, num_segments, SIZE, WIDTH, ROWS)
    x = tl.load(pointer + offset, mask=inside, other=0.0)
    if SCALED:
        scale = load_floats(payload, segment + tl.zeros([1], tl.int32), True, ALIGNED)[:, None]
        codes = narrow(x * tl.div_rn(tl.full([1, 1], 1.0, tl.float32), scale), MANTISSA, BIAS, BITS, NAN)
        lost = x - widen(codes, MANTISSA, BIAS, BITS, INFINITE) * scale
    else:
        codes = narrow(x, MANTISSA, BIAS, BITS, NAN)
        lost = x - widen(codes, MANTISSA, BIAS, BITS, INFINITE)
    arguments = (rows, payload, num_segments, segment, start, numel, offset, inside, codes, lost)
    store_tile(*arguments, BITS, RESIDUAL, SIZE, WIDTH, ROWS)


@triton.jit(do_not_specialize=["num_segments", "num_payloads"])
def _decode(
    rows,
    payloads,
    flag,
    num_segments,
    num_payloads,
    weight,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    INFINITE: tl.constexpr,
    SCALED: tl.constexpr,
    ADD: tl.constexpr,
    ALIGNED: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    segment, _, start, pointer, numel, offset, inside = find_tile(rows, num_segments, SIZE, WIDTH, ROWS)
    first_byte = first_code(rows, num_segments, segment, start, BITS)
    total = load_total(pointer + offset, inside, ADD)
    for i in range(1 if ADD else num_payloads):
        payload = tl.load(payloads + i).to(tl.pointer_type(tl.uint8))
        codes = load_codes(payload + first_byte, numel * (BITS // 8), BITS, SIZE, WIDTH, ROWS)
        step = weight
        if SCALED:
            step = load_floats(payload, segment + tl.zeros([1], tl.int32), True, ALIGNED)[:, None] * weight
        total += widen(codes, MANTISSA, BIAS, BITS, INFINITE) * step
    store_total(pointer + offset, inside, total, flag, ADD)


# ---- what is compiled and counted without a GPU ----

add_variant(
    Variant(
        "cast.encode: scales",
        _store_scales,
        {"MOST": 448.0, "BUCKET": MAX_SEGMENT_NUMEL, "ALIGNED": True},
        BUCKET_SIGNATURE,
        BUCKET_NUMEL,
        8 / 1024,
        launches=3,
    )
)


def _add_variants(dtype: str) -> None:
    constants = _constants(dtype)
    launches = 3 if constants["SCALED"] else 1
    add_variant(
        Variant(
            f"cast.encode: {dtype}, residual",
            _encode,
            {**constants, "NAN": _NAN[dtype], "RESIDUAL": True, "ALIGNED": True},
            SIGNATURE,
            TILES.numel,
            least_bytes=8 + WIDTHS[dtype],
            launches=launches,
        )
    )
    add_decoder_variants("cast", dtype, _decode, constants, TILES.numel, WIDTHS[dtype])


_add_variants("float16")
_add_variants("float8_e4m3fn")
