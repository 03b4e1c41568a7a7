"""Shorter float types: bfloat16, float16, and two 8-bit types with a power of two per segment as its scale.

Source: 8-bit types as in Micikevicius et al., "FP8 formats for deep learning", arXiv 2209.05433.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .backend import kernel
from .checks import check_numels, checked_encoder, checked_payload, checked_payloads, numels_of
from .flags import Flag
from .reduce import sum_payloads
from .scales import float32, magnitude, scale_bytes, split_scales

WIDTHS = {"bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}  # bytes; in the order of C++


def nbytes(numels: Sequence[int], dtype: str) -> int:
    """Size of the payload in bytes: 2 per element, or 1 and a float32 scale per segment.

    Raises:
        ValueError: if `dtype` is none of "bfloat16", "float16", "float8_e4m3fn" and "float8_e5m2", or a segment's size
            is out of range.

    Example:
        >>> nbytes([1000, 3], "bfloat16"), nbytes([1000, 3], "float8_e4m3fn")
        (2006, 1011)
    """
    check_numels(numels)
    if dtype not in WIDTHS:
        raise ValueError(f"dtype: expected one of {list(WIDTHS)}, got {dtype!r}")
    width = WIDTHS[dtype]
    return width * sum(numels) + (4 * len(numels) if width == 1 else 0)


def encode(xs: Sequence[Tensor], out: Tensor, dtype: str, residuals: Sequence[Tensor] | None = None) -> None:
    """Round each element to a shorter float type, to nearest even; 8-bit types after division by a segment's scale.

    The scale is the least power of two by which the segment's largest magnitude divided is in range (448 for e4m3fn,
    57344 for e5m2), 1 for a segment of zeros: `code = round(x / scale)`, `value = code * scale`.

    Args:
        xs: segments of float32.
        out: uint8 of `nbytes(numels, dtype)` bytes, written: for 8-bit types all scales, then all codes.
        dtype: "bfloat16", "float16", "float8_e4m3fn" or "float8_e5m2".
        residuals: where given, `x - value` is written here; may be `xs` itself.

    A finite element beyond float16's range becomes infinite. A non-finite element of an 8-bit type makes its whole
    segment decode to non-finite values. One NaN is sent for all NaNs.

    Raises:
        ValueError: if there is no such type, or a buffer has the wrong kind or size.

    Example:
        >>> payload = torch.empty(nbytes([2], "float8_e4m3fn"), dtype=torch.uint8)
        >>> encode([torch.tensor([896.0, 1.03])], payload, "float8_e4m3fn")
        >>> out = torch.zeros(2)
        >>> decode_add(payload, [out], 1.0, "float8_e4m3fn")
        >>> out
        tensor([896.,   1.])
    """
    xs, out, residuals = checked_encoder(xs, out, nbytes(numels_of(xs), dtype), residuals)
    _encode.on[out.device.type](xs, out, dtype, residuals)


def decode_add(payload: Tensor, outs: Sequence[Tensor], weight: float, dtype: str) -> None:
    """Add `weight` times the values of a payload: `outs[i] += code * (scale * weight)`.

    Raises:
        ValueError: if there is no such type, or the payload's size does not fit the segments.
    """
    payload, outs = checked_payload(payload, outs, nbytes(numels_of(outs), dtype))
    _decode_add.on[payload.device.type](payload, outs, weight, dtype)


def decode_sum(payloads: Sequence[Tensor], outs: Sequence[Tensor], weight: float, dtype: str) -> Flag:
    """Overwrite `outs` with the sum of payloads: `decode_add` of each into zeros, on GPUs in one pass over memory.

    Returns:
        Whether the whole result is finite: a `bool` in main memory, elsewhere a flag on the device.

    Raises:
        ValueError: if a payload's size does not fit the segments, or there is no payload.
    """
    checked, outs = checked_payloads(payloads, outs, nbytes(numels_of(outs), dtype))
    return _decode_sum.on[checked[0].device.type](checked, outs, weight, dtype)


# ---- the reference ----

# The one NaN of each type that is sent.
_NAN = {"bfloat16": 0x7FC0, "float16": 0x7E00, "float8_e4m3fn": 0x7F, "float8_e5m2": 0x7E}


@kernel
def _encode(xs: list[Tensor], out: Tensor, dtype: str, residuals: list[Tensor] | None) -> None:
    has_scales = WIDTHS[dtype] == 1
    scales, parts = [], []
    for i, x in enumerate(xs):
        scale = _power_of_two(x, dtype) if has_scales else torch.ones((), dtype=torch.float32, device=x.device)
        # The reciprocal of a power of two is exact, so this product is the quotient.
        codes = _narrowed(x * (torch.ones_like(scale) / scale), dtype)
        scales.append(scale.view(1))
        parts.append(codes.view(torch.uint8))
        if residuals is not None:
            residuals[i].copy_(x - _widened(codes, dtype) * scale)
    out.copy_(torch.cat([scale_bytes(scales if has_scales else [], out.device), *parts]))


@kernel
def _decode_add(payload: Tensor, outs: list[Tensor], weight: float, dtype: str) -> None:
    width = WIDTHS[dtype]
    scales, codes = split_scales(payload, len(outs) if width == 1 else 0)
    scales = scales if width == 1 else torch.ones(len(outs), dtype=torch.float32, device=payload.device)
    for out, step in zip(outs, scales * float32(weight, payload.device), strict=True):
        part, codes = codes.tensor_split([out.numel() * width])
        out += _widened(part.clone(), dtype) * step  # a copy, because it may start at any address


@kernel
def _decode_sum(payloads: list[Tensor], outs: list[Tensor], weight: float, dtype: str) -> Flag:
    return sum_payloads(_decode_add.on[payloads[0].device.type], payloads, outs, weight, dtype)


def _power_of_two(x: Tensor, dtype: str) -> Tensor:
    """The least power of two by which `x` divided stays in range; 1 for zero, and not finite if x is not."""
    most = magnitude(x).amax().view(torch.float32) if x.numel() else x.new_zeros(())
    mantissa, exponent = torch.frexp(most / torch.full_like(most, torch.finfo(getattr(torch, dtype)).max))
    # `frexp` gives an exact power of two as half of the next one. Normal float32 exponents are -126 to 127.
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-126, 127)
    scale = torch.ldexp(torch.ones_like(most), exponent)
    return torch.where(most.isfinite(), torch.where(most > 0, scale, torch.ones_like(scale)), most)


def _narrowed(x: Tensor, dtype: str) -> Tensor:
    codes = x.to(getattr(torch, dtype)).view(torch.int16 if WIDTHS[dtype] == 2 else torch.uint8)
    return torch.where(x.isnan(), torch.full_like(codes, _NAN[dtype]), codes)


def _widened(codes: Tensor, dtype: str) -> Tensor:
    return codes.view(getattr(torch, dtype)).float()
