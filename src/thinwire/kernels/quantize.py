"""Stochastic quantization to evenly spaced levels: a scale for each bucket, then bit-packed codes.

Source: QSGD, Alistarh et al., arXiv 1610.02132.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from . import bits as bit
from .backend import kernel
from .checks import (
    check_bucket_size,
    check_length,
    check_numels,
    checked_encoder,
    checked_payload,
    checked_payloads,
    numels_of,
)
from .flags import Flag
from .random import uniform_of
from .reduce import finite
from .scales import MAX_SCALE, MIN_SCALE, MIN_SCALE_WIDE, bucket_scales, float32, scale_bytes, split_scales, spread

Coded = tuple[Tensor, Tensor, Tensor]  # of one segment: codes, scales, decoded values


@dataclass(frozen=True)
class Quantizer:
    """Evenly spaced levels: `num_steps + 1` of them from -scale to scale.

    Args:
        bits: bits per code, 1 to 16. Lower => smaller payload.
        num_steps: steps between the lowest and the highest level, at most `2**bits - 1`. Even => zero is a level.
        bucket_size: elements per scale. Higher => smaller payload, larger error.
        norm: the scale of a bucket: "max" (its largest magnitude) or "l2".

    Raises:
        ValueError: if a field is out of range.
    """

    bits: int
    num_steps: int
    bucket_size: int
    norm: str = "max"

    def __post_init__(self) -> None:
        check_buckets(self.bits, self.bucket_size, self.norm)
        if not 1 <= self.num_steps <= 2**self.bits - 1:
            raise ValueError(
                f"num_steps: expected 1 to {2**self.bits - 1} (2**bits - 1 for {self.bits} bits), got {self.num_steps}"
            )

    def nbytes(self, numels: Sequence[int]) -> int:
        """Size of the payload in bytes: a float32 scale per bucket, then `ceil(numel * bits / 8)` bytes per segment.

        Raises:
            ValueError: if a segment's size is out of range.

        Example:
            >>> Quantizer(bits=4, num_steps=14, bucket_size=512).nbytes([1000])
            508
        """
        return codes_nbytes(numels, self.bits, self.bucket_size)


@dataclass(frozen=True, eq=False)
class Quantizers:
    """A quantizer for each segment. The payload has one part for each distinct quantizer, in order, with all its segments.

    Equality is identity, which makes an object a cheap key of a cache.

    Args:
        distinct: the quantizers.
        which: the position of each segment's quantizer in `distinct`; empty if all segments have the first one.
    """

    distinct: tuple[Quantizer, ...]
    which: tuple[int, ...] = ()

    @classmethod
    def of(cls, each: Sequence[Quantizer]) -> Quantizers:
        """For segments with these quantizers.

        Example:
            >>> two, four = Quantizer(2, 2, 512), Quantizer(4, 14, 512)
            >>> Quantizers.of([four, two, four]).which
            (0, 1, 0)
        """
        positions: dict[Quantizer, int] = {}
        which = [positions.setdefault(quantizer, len(positions)) for quantizer in each]
        return cls(tuple(positions), tuple(which))

    def nbytes(self, numels: Sequence[int]) -> int:
        """Size of the payload in bytes.

        Raises:
            ValueError: if a segment's size is out of range, or there are more or fewer segments.
        """
        return _nbytes(self, tuple(numels))

    def groups(self, num_segments: int) -> list[tuple[Quantizer, list[int]]]:
        """Each distinct quantizer with the positions of its segments."""
        if not self.which:
            return [(self.distinct[0], list(range(num_segments)))]
        check_length("quantizers", self.which, num_segments)
        positions: list[list[int]] = [[] for _ in self.distinct]
        for i, group in enumerate(self.which):
            positions[group].append(i)
        return list(zip(self.distinct, positions, strict=True))

    def split(
        self, segments: Sequence[Tensor], payloads: Sequence[Tensor]
    ) -> Iterator[tuple[Quantizer, list[int], list[Tensor]]]:
        """Each distinct quantizer, the positions of its segments, and its part of every payload."""
        start = 0
        for quantizer, positions in self.groups(len(segments)):
            end = start + quantizer.nbytes([segments[i].numel() for i in positions])
            yield quantizer, positions, [payload[start:end] for payload in payloads]
            start = end


@lru_cache(maxsize=1024)
def _nbytes(quantizers: Quantizers, numels: tuple[int, ...]) -> int:
    return sum(q.nbytes([numels[i] for i in positions]) for q, positions in quantizers.groups(len(numels)))


def encode(
    xs: Sequence[Tensor],
    out: Tensor,
    keys: Sequence[int],
    quantizer: Quantizer | Quantizers,
    residuals: Sequence[Tensor] | None = None,
) -> None:
    """Quantize each segment stochastically to evenly spaced levels; unbiased.

    With `m = num_steps` and a bucket's `scale`:
    `code = clamp(floor((x * m / scale + m) / 2 + u), 0, m)`, `value = (2 code - m) * scale / m`, `u ~ U[0, 1)`.

    Args:
        xs: segments of float32.
        out: uint8 of `quantizer.nbytes(...)` bytes, written: all scales, then all codes.
        keys: one 64-bit key per segment; the element's position in its segment is the counter.
        quantizer: the levels and the buckets: one quantizer for all segments, or one for each.
        residuals: where given, `x - value` is written here; may be `xs` itself.

    A bucket with a non-finite element decodes to non-finite values. With one step, so does a bucket with a scale above
    0x1.fffp126, because its residuals could overflow. Scales below 2^-118 (2^-110 for more than 255 steps) are sent as 0.

    Raises:
        ValueError: if a buffer has the wrong kind or size.

    Example:
        >>> x, quantizer = torch.tensor([0.0, -1.0, 2.0]), Quantizer(bits=4, num_steps=14, bucket_size=512)
        >>> payload = torch.empty(quantizer.nbytes([3]), dtype=torch.uint8)
        >>> encode([x], payload, keys=[7], quantizer=quantizer)
        >>> out = torch.zeros(3)
        >>> decode_add(payload, [out], 1.0, quantizer)
        >>> bool(((out - x).abs() < 4 / 14).all())
        True
    """
    xs, out, residuals = checked_encoder(xs, out, quantizer.nbytes(numels_of(xs)), residuals)
    check_length("keys", keys, len(xs))
    _encode.on[out.device.type](xs, out, list(keys), _all(quantizer), residuals)


def _all(quantizer: Quantizer | Quantizers) -> Quantizers:
    return Quantizers((quantizer,)) if isinstance(quantizer, Quantizer) else quantizer


def decode_add(payload: Tensor, outs: Sequence[Tensor], weight: float, quantizer: Quantizer | Quantizers) -> None:
    """Add `weight` times the values of a payload: `outs[i] += (2 code - m) * (scale / m * weight)`.

    Args:
        payload: uint8, as `encode` wrote it.
        outs: float32 segments of the encoder's sizes, added to.
        weight: factor of all values.
        quantizer: as given to `encode`.

    Raises:
        ValueError: if the payload's size does not fit the segments.
    """
    payload, outs = checked_payload(payload, outs, quantizer.nbytes(numels_of(outs)))
    _decode_add.on[payload.device.type](payload, outs, weight, _all(quantizer))


def decode_sum(
    payloads: Sequence[Tensor], outs: Sequence[Tensor], weight: float, quantizer: Quantizer | Quantizers
) -> Flag:
    """Overwrite `outs` with `weight` times the sum of payloads, added in their order; one pass over memory.

    Args:
        payloads: one or more, each uint8, as `encode` wrote it.
        outs: float32 segments of the encoder's sizes, overwritten.
        weight: factor of all values.
        quantizer: as given to `encode`.

    Returns:
        Whether the whole result is finite: a `bool` in main memory, elsewhere a flag on the device.

    Raises:
        ValueError: if a payload's size does not fit the segments, or there is no payload.
    """
    checked, outs = checked_payloads(payloads, outs, quantizer.nbytes(numels_of(outs)))
    return _decode_sum.on[checked[0].device.type](checked, outs, weight, _all(quantizer))


def check_buckets(bits: int, bucket_size: int, norm: str) -> None:
    """Raise ValueError unless `bits` is 1 to 16, `bucket_size` is in its range, and `norm` is "max" or "l2"."""
    if not 1 <= bits <= 16:
        raise ValueError(f"bits: expected 1 to 16, got {bits}")
    check_bucket_size(bucket_size)
    if norm not in ("max", "l2"):
        raise ValueError(f"norm: expected 'max' or 'l2', got {norm!r}")


def codes_nbytes(numels: Sequence[int], bits: int, bucket_size: int) -> int:
    """Bytes of a float32 scale per bucket and of bit-packed codes, byte aligned per segment."""
    check_numels(numels)
    return sum([4 * -(-n // bucket_size) + (n * bits + 7) // 8 for n in numels])


# ---- the reference ----


@kernel
def _encode(
    xs: list[Tensor], out: Tensor, keys: list[int], quantizers: Quantizers, residuals: list[Tensor] | None
) -> None:
    for quantizer, at, (part,) in quantizers.split(xs, [out]):
        coded = [_quantize_segment(xs[i], keys[i], quantizer) for i in at]
        store_codes(coded, [xs[i] for i in at], part, quantizer.bits, residuals and [residuals[i] for i in at])


@kernel
def _decode_add(payload: Tensor, outs: list[Tensor], weight: float, quantizers: Quantizers) -> None:
    _decode(Tensor.add_, payload, outs, weight, quantizers)


@kernel
def _decode_sum(payloads: list[Tensor], outs: list[Tensor], weight: float, quantizers: Quantizers) -> Flag:
    for i, payload in enumerate(payloads):
        # The first payload is copied: added to zeros, it would lose the sign of -0.0.
        _decode(Tensor.add_ if i else Tensor.copy_, payload, outs, weight, quantizers)
    return finite(outs)


def _quantize_segment(x: Tensor, key: int, quantizer: Quantizer) -> Coded:
    num_steps = quantizer.num_steps
    least = MIN_SCALE_WIDE if num_steps > 255 else MIN_SCALE
    scales = bucket_scales(x, quantizer.bucket_size, quantizer.norm, least)
    if num_steps == 1:  # a step is twice the scale: where that overflows, so may the residual
        scales = torch.where(scales > MAX_SCALE / 2, torch.full_like(scales, math.inf), scales)
    scale = spread(scales, quantizer.bucket_size, x)
    steps = torch.full_like(scale, num_steps)
    t = (x * (steps / scale) + num_steps) * 0.5
    # Rounding may lift t + u to `num_steps + 1`, so codes are clamped.
    codes = (t + uniform_of(key, x.numel(), x.device)).floor().clamp(0, num_steps)
    codes = torch.where(scale.isfinite() & (scale > 0), codes, torch.zeros_like(codes))
    return codes.int(), scales, (2 * codes - num_steps) * (scale / steps)


def _decode(
    put: Callable[[Tensor, Tensor], Tensor], payload: Tensor, outs: list[Tensor], weight: float, quantizers: Quantizers
) -> None:
    for quantizer, at, (part,) in quantizers.split(outs, [payload]):
        num_steps, bucket_size = quantizer.num_steps, quantizer.bucket_size
        for out, codes, scales in each_coded(part, [outs[i] for i in at], quantizer.bits, bucket_size):
            step = scales / torch.full_like(scales, num_steps) * float32(weight, out.device)
            put(out, (2 * codes - num_steps).float() * spread(step, bucket_size, out))


def store_codes(coded: list[Coded], xs: list[Tensor], out: Tensor, bits: int, residuals: list[Tensor] | None) -> None:
    """Write the payload of coded segments, and the residuals."""
    codes = [bit.pack(bit.to_bits(code, bits)) for code, _, _ in coded]
    out.copy_(torch.cat([scale_bytes([scales for _, scales, _ in coded], out.device), *codes]))
    for x, residual, (_, _, value) in zip(xs, residuals or [], coded, strict=False):
        residual.copy_(x - value)


def each_coded(
    payload: Tensor, outs: list[Tensor], bits: int, bucket_size: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Each segment with its codes and scales in a payload."""
    num_buckets = [-(-x.numel() // bucket_size) for x in outs]
    scales, codes = split_scales(payload, sum(num_buckets))
    for out, scale in zip(outs, bit.split(scales, num_buckets), strict=True):
        n = out.numel()
        segment, codes = codes.tensor_split([(n * bits + 7) // 8])
        yield out, bit.from_bits(bit.unpack(segment)[: n * bits], bits), scale
