"""Stochastic quantization to any ascending levels: the payload of `quantize`, with codes that name levels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .backend import kernel
from .checks import check_length, checked_encoder, checked_payload, checked_payloads, numels_of
from .flags import Flag
from .quantize import Coded, check_buckets, codes_nbytes, each_coded, store_codes
from .random import uniform_of
from .reduce import sum_payloads
from .scales import bucket_scales, float32, spread

MAX_LEVELS = 256


@dataclass(frozen=True)
class Levels:
    """Levels in units of a bucket's scale.

    Args:
        values: 2 to 256 numbers in [-1, 1], ascending as float32; kept rounded to float32. Up to 16 are fastest.
        bucket_size: elements per scale. Higher => smaller payload, larger error.
        norm: the scale of a bucket: "max" (its largest magnitude) or "l2".

    Raises:
        ValueError: if a field is out of range.
    """

    values: tuple[float, ...]
    bucket_size: int
    norm: str = "max"

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", checked_levels(self.values))
        check_buckets(self.bits, self.bucket_size, self.norm)

    @property
    def bits(self) -> int:
        """Bits per code: `ceil(log2(number of levels))`."""
        return levels_bits(len(self.values))

    def nbytes(self, numels: Sequence[int]) -> int:
        """Size of the payload in bytes: a float32 scale per bucket, then `ceil(numel * bits / 8)` bytes per segment.

        Raises:
            ValueError: if a segment's size is out of range.
        """
        return codes_nbytes(numels, self.bits, self.bucket_size)


def levels_bits(num_levels: int) -> int:
    """Bits of a code that names one of 2 to 256 levels: `ceil(log2(num_levels))`.

    Raises:
        ValueError: if the number of levels is out of range.

    Example:
        >>> levels_bits(7)
        3
    """
    if not 2 <= num_levels <= MAX_LEVELS:
        raise ValueError(f"levels: expected 2 to {MAX_LEVELS}, got {num_levels}")
    return (num_levels - 1).bit_length()


def checked_levels(levels: Sequence[float]) -> tuple[float, ...]:
    """Round levels to float32 and check them: 2 to 256, ascending, within [-1, 1].

    Raises:
        ValueError: if they are not.
    """
    rounded = torch.tensor(levels, dtype=torch.float32, device="cpu").tolist()
    levels_bits(len(rounded))  # raises if there are too few or too many
    # Written so that NaN is refused too: its comparisons are all false.
    for i, (before, level) in enumerate(pairwise([-math.inf, *rounded])):
        if not (before < level and -1 <= level <= 1):
            got = rounded[max(0, i - 1) : i + 1]
            raise ValueError(
                f"levels: expected strictly ascending numbers in [-1, 1], as float32, got {got} at number {i}"
            )
    return tuple(rounded)


def encode(
    xs: Sequence[Tensor],
    out: Tensor,
    keys: Sequence[int],
    levels: Levels,
    residuals: Sequence[Tensor] | None = None,
) -> None:
    """Quantize each segment stochastically to a bucket's scale times one of the levels; unbiased between the outer two.

    With `r = x / scale` between the neighbouring levels `l <= r < h`: h is chosen if `u (h - l) < r - l`, `u ~ U[0, 1)`.
    An element that lies at a level stays there; one beyond the outer levels goes to the nearest.

    Args:
        xs: segments of float32.
        out: uint8 of `levels.nbytes(...)` bytes, written: all scales, then all codes.
        keys: one 64-bit key per segment; the element's position in its segment is the counter.
        levels: the levels and the buckets.
        residuals: where given, `x - value` is written here; may be `xs` itself.

    A non-finite element makes its whole bucket decode to non-finite values. Scales below 2^-118 are sent as 0.

    Raises:
        ValueError: if a buffer has the wrong kind or size.

    Source: Faghri et al. 2020, Adaptive gradient quantization, arXiv 2010.12460.

    Example:
        >>> x, levels = torch.tensor([0.25, -1.0, 0.0, 0.5]), Levels((-1.0, 0.0, 0.25, 1.0), bucket_size=512)
        >>> payload = torch.empty(levels.nbytes([4]), dtype=torch.uint8)
        >>> encode([x], payload, keys=[7], levels=levels)
        >>> out = torch.zeros(4)
        >>> decode_add(payload, [out], 1.0, levels)
        >>> out[:3]  # the last becomes 0.25 or 1, with probabilities 2/3 and 1/3
        tensor([ 0.2500, -1.0000,  0.0000])
    """
    xs, out, residuals = checked_encoder(xs, out, levels.nbytes(numels_of(xs)), residuals)
    check_length("keys", keys, len(xs))
    _encode.on[out.device.type](xs, out, list(keys), levels, residuals)


def decode_add(payload: Tensor, outs: Sequence[Tensor], weight: float, levels: Levels) -> None:
    """Add `weight` times the values of a payload: `outs[i] += levels[code] * (scale * weight)`.

    Args:
        payload: uint8, as `encode` wrote it.
        outs: float32 segments of the encoder's sizes, added to.
        weight: factor of all values.
        levels: as given to `encode`.

    Raises:
        ValueError: if the payload's size does not fit the segments.
    """
    payload, outs = checked_payload(payload, outs, levels.nbytes(numels_of(outs)))
    _decode_add.on[payload.device.type](payload, outs, weight, levels)


def decode_sum(payloads: Sequence[Tensor], outs: Sequence[Tensor], weight: float, levels: Levels) -> Flag:
    """Overwrite `outs` with the sum of payloads: `decode_add` of each into zeros, on GPUs in one pass over memory.

    Args:
        payloads: one or more, each uint8, as `encode` wrote it.
        outs: float32 segments of the encoder's sizes, overwritten.
        weight: factor of all values.
        levels: as given to `encode`.

    Returns:
        Whether the whole result is finite: a `bool` in main memory, elsewhere a flag on the device.

    Raises:
        ValueError: if a payload's size does not fit the segments, or there is no payload.
    """
    checked, outs = checked_payloads(payloads, outs, levels.nbytes(numels_of(outs)))
    return _decode_sum.on[checked[0].device.type](checked, outs, weight, levels)


# ---- the reference ----


@kernel
def _encode(xs: list[Tensor], out: Tensor, keys: list[int], levels: Levels, residuals: list[Tensor] | None) -> None:
    coded = [_quantize_segment(x, key, levels) for x, key in zip(xs, keys, strict=True)]
    store_codes(coded, xs, out, levels.bits, residuals)


@kernel
def _decode_add(payload: Tensor, outs: list[Tensor], weight: float, levels: Levels) -> None:
    # A corrupt code may name a level that does not exist: it counts as the last one.
    missing = 2**levels.bits - len(levels.values)
    table = float32(levels.values + levels.values[-1:] * missing, payload.device)
    for out, codes, scales in each_coded(payload, outs, levels.bits, levels.bucket_size):
        out += table[codes] * spread(scales * float32(weight, out.device), levels.bucket_size, out)


@kernel
def _decode_sum(payloads: list[Tensor], outs: list[Tensor], weight: float, levels: Levels) -> Flag:
    return sum_payloads(_decode_add.on[payloads[0].device.type], payloads, outs, weight, levels)


def _quantize_segment(x: Tensor, key: int, levels: Levels) -> Coded:
    table = float32(levels.values, x.device)
    scales = bucket_scales(x, levels.bucket_size, levels.norm)
    scale = spread(scales, levels.bucket_size, x)
    # The format asks for the reciprocal: a quotient would round differently.
    r = x * (torch.ones_like(scale) / scale)
    # Only inner levels, so that `code + 1` is always a level.
    code = torch.searchsorted(table[1:-1].contiguous(), r, right=True)  # NaN comes last
    low, high = table[code], table[code + 1]
    code = code + (r - low > uniform_of(key, x.numel(), x.device) * (high - low)).int()
    code = torch.where(scale.isfinite() & (scale > 0), code, torch.zeros_like(code))
    return code, scales, table[code] * scale
