"""Quantization to any levels in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .. import levels as family
from ..flags import Flag
from ..levels import Levels
from ..scales import MIN_SCALE
from .buckets import Coding
from .device import is_finite


@family._encode.runs_on("triton")
def encode(xs: list[Tensor], out: Tensor, keys: list[int], levels: Levels, residuals: list[Tensor] | None) -> None:
    _coding(levels).encode(xs, out, residuals, keys)


@family._decode_add.runs_on("triton")
def decode_add(payload: Tensor, outs: list[Tensor], weight: float, levels: Levels) -> None:
    _coding(levels).decode([payload], outs, weight, add=True)


@family._decode_sum.runs_on("triton")
def decode_sum(payloads: list[Tensor], outs: list[Tensor], weight: float, levels: Levels) -> Flag:
    return _coding(levels).decode(payloads, outs, weight, add=False)


@triton.jit
def _round(x, scale, _second, u, level_table, PARAMETERS: tl.constexpr):
    """Stochastic rounding to a neighbouring level; `kernels.levels._quantize_segment`."""
    BITS: tl.constexpr = PARAMETERS[0]
    LEVELS: tl.constexpr = PARAMETERS[1]
    usable = is_finite(scale) & (scale > 0)
    r = x * tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    # The last inner level that is at most r, found bit by bit from the highest; 0 if there is none.
    code = tl.zeros(x.shape, tl.int32)
    for i in tl.static_range(BITS):
        higher = code + (1 << (BITS - 1 - i))
        exists = higher <= LEVELS - 2
        level = _level(level_table, tl.minimum(higher, LEVELS - 1))
        code = tl.where(exists & (level <= r), higher, code)
    low = _level(level_table, code)
    up = (r - low > u * (_level(level_table, code + 1) - low)) & usable
    code = tl.where(usable, code + up.to(tl.int32), 0)
    return code, _level(level_table, code) * scale


@triton.jit
def _value(codes, scale, _second, weight, level_table, PARAMETERS: tl.constexpr):
    """A corrupt code that names no level counts as the last one."""
    LEVELS: tl.constexpr = PARAMETERS[1]
    return _level(level_table, tl.minimum(codes, LEVELS - 1)) * (scale * weight)


@triton.jit
def _level(level_table, codes):
    """The levels of codes in the shape of `by_row`. A load in that shape would move codes between threads."""
    return tl.reshape(tl.load(level_table + tl.reshape(codes, (codes.numel,))), codes.shape)


def _coding(levels: Levels) -> Coding:
    return Coding(
        levels.bits,
        levels.bucket_size,
        _round,
        _value,
        (levels.bits, len(levels.values)),
        norm=levels.norm,
        least=MIN_SCALE,
        levels=levels.values,
    )
