"""Shorter float types in Triton, in integer arithmetic: Triton's own conversions differ between its interpreter and GPUs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import cast as family
from ..cast import _NAN, WIDTHS
from ..checks import MAX_SEGMENT_NUMEL
from ..flags import Flag
from .block_sums import store_numbers
from .buckets import Coding
from .device import is_finite

MANTISSA = {"bfloat16": 7, "float16": 10, "float8_e4m3fn": 3, "float8_e5m2": 2}  # bits
BIAS = {"bfloat16": 127, "float16": 15, "float8_e4m3fn": 7, "float8_e5m2": 15}  # of exponents


@family._encode.runs_on("triton")
def encode(xs: list[Tensor], out: Tensor, dtype: str, residuals: list[Tensor] | None) -> None:
    if WIDTHS[dtype] == 1:
        store_numbers(xs, out, "max", _power_of_two, (_largest(dtype),), least_buckets=1)
    _coding(dtype).encode(xs, out, residuals)


@family._decode_add.runs_on("triton")
def decode_add(payload: Tensor, outs: list[Tensor], weight: float, dtype: str) -> None:
    _coding(dtype).decode([payload], outs, weight, add=True)


@family._decode_sum.runs_on("triton")
def decode_sum(payloads: list[Tensor], outs: list[Tensor], weight: float, dtype: str) -> Flag:
    return _coding(dtype).decode(payloads, outs, weight, add=False)


def _largest(dtype: str) -> float:
    return torch.finfo(getattr(torch, dtype)).max


def _coding(dtype: str) -> Coding:
    bits = 8 * WIDTHS[dtype]
    parameters = (MANTISSA[dtype], BIAS[dtype], bits, int(dtype != "float8_e4m3fn"), _NAN[dtype])
    return Coding(bits, MAX_SEGMENT_NUMEL, _round, _value, parameters, numbers=1 if bits == 8 else 0, least_buckets=1)


@triton.jit
def _power_of_two(largest, _second, _third, _size, _argument, PARAMETERS: tl.constexpr):
    """The least power of two by which the segment divided is at most the largest number of the type."""
    largest = largest.to(tl.int32).to(tl.float32, bitcast=True)
    bits = tl.div_rn(largest, tl.full([], PARAMETERS[0], tl.float32)).to(tl.int32, bitcast=True)
    # The exponent of the next power of two, or of the number itself if it is one.
    exponent = (bits >> 23) - 126 - ((bits & 0x7FFFFF) == 0).to(tl.int32)
    exponent = tl.where(bits == 0, 0, tl.minimum(tl.maximum(exponent, -126), 127))
    scale = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    scale = tl.where(is_finite(largest), tl.where(largest > 0, scale, 1.0), largest)
    return scale, scale


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
            code = tl.minimum(code, INFINITY)  # 8-bit types get numbers in their range
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
    sign = (code.to(tl.uint32) << (32 - BITS)) & 0x80000000
    return (x.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def _round(x, scale, _second, _u, _level_table, PARAMETERS: tl.constexpr):
    codes = narrow(
        x * tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale),
        PARAMETERS[0],
        PARAMETERS[1],
        PARAMETERS[2],
        PARAMETERS[4],
    )
    return codes, _value(codes, scale, scale, 1.0, _level_table, PARAMETERS)


@triton.jit
def _value(codes, scale, _second, weight, _level_table, PARAMETERS: tl.constexpr):
    return widen(codes, PARAMETERS[0], PARAMETERS[1], PARAMETERS[2], PARAMETERS[3]) * (scale * weight)
