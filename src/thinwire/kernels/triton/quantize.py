"""Quantization to evenly spaced levels in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .. import quantize as family
from ..flags import Flag, all_of
from ..quantize import Quantizer, Quantizers
from ..scales import MAX_SCALE, MIN_SCALE, MIN_SCALE_WIDE
from .buckets import Coding
from .device import is_finite


@family._encode.runs_on("triton")
def encode(
    xs: list[Tensor], out: Tensor, keys: list[int], quantizers: Quantizers, residuals: list[Tensor] | None
) -> None:
    for quantizer, at, (part,) in quantizers.split(xs, [out]):
        lost = None if residuals is None else [residuals[i] for i in at]
        _coding(quantizer).encode([xs[i] for i in at], part, lost, [keys[i] for i in at])


@family._decode_add.runs_on("triton")
def decode_add(payload: Tensor, outs: list[Tensor], weight: float, quantizers: Quantizers) -> None:
    for quantizer, at, parts in quantizers.split(outs, [payload]):
        _coding(quantizer).decode(parts, [outs[i] for i in at], weight, add=True)


@family._decode_sum.runs_on("triton")
def decode_sum(payloads: list[Tensor], outs: list[Tensor], weight: float, quantizers: Quantizers) -> Flag:
    return all_of(
        [
            _coding(quantizer).decode(parts, [outs[i] for i in at], weight, add=False)
            for quantizer, at, parts in quantizers.split(outs, payloads)
        ]
    )


@triton.jit
def _round(x, scale, _second, u, level_table, PARAMETERS: tl.constexpr):
    """Stochastic rounding to `STEPS` steps from -scale to scale; `kernels.quantize._quantize_segment`."""
    STEPS: tl.constexpr = PARAMETERS[0]
    steps = tl.full(scale.shape, STEPS, tl.float32)
    usable = is_finite(scale) & (scale > 0)
    t = (x * tl.div_rn(steps, scale) + STEPS) * 0.5
    # The cast cuts off: below zero this is no floor, but the clamp gives 0 either way.
    codes = tl.where(usable, t + u, 0.0).to(tl.int32)
    codes = tl.minimum(tl.maximum(codes, 0), STEPS)
    return codes, _num_steps(codes, level_table, STEPS) * tl.div_rn(scale, steps)


@triton.jit
def _value(codes, scale, _second, weight, level_table, PARAMETERS: tl.constexpr):
    STEPS: tl.constexpr = PARAMETERS[0]
    step = tl.div_rn(scale, tl.full(scale.shape, STEPS, tl.float32)) * weight
    return _num_steps(codes, level_table, STEPS) * step


@triton.jit
def _num_steps(codes, level_table, STEPS: tl.constexpr):
    """2 codes - STEPS as float32: exact, and without a conversion of integers, which is slow.

    The lowest bit of a float32 from 2^23 to 2^24 counts 1. The kernel reads 2^23 from the table, because a GPU masks a code
    and adds the bits of 2^23 in one instruction only if one of the two numbers is a constant.
    """
    power = tl.load(level_table).to(tl.int32, bitcast=True)
    return ((2 * codes) | power).to(tl.float32, bitcast=True) - (2.0**23 + STEPS)


def _coding(q: Quantizer) -> Coding:
    return Coding(
        q.bits,
        q.bucket_size,
        _round,
        _value,
        (q.num_steps,),
        norm=q.norm,
        least=MIN_SCALE_WIDE if q.num_steps > 255 else MIN_SCALE,
        # With one step, a step is twice the scale: where that overflows, so may the residual.
        most=MAX_SCALE / 2 if q.num_steps == 1 else float("inf"),
        keeps_sign=True,
        levels=(2.0**23,),
    )
