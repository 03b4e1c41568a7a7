"""Ternary values -1, 0 and 1 times a scale, packed as digits of an odd base.

Source: TernGrad, Wen et al., arXiv 1705.07878.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import bits as bit
from .backend import kernel
from .checks import (
    MAX_SEGMENT_NUMEL,
    check_bucket_size,
    check_length,
    check_numels,
    checked_encoder,
    checked_payload,
    checked_payloads,
    device_of,
    num_buckets,
    numels_of,
    segments,
    vector,
)
from .flags import Flag
from .random import MASK32, uniform_of
from .reduce import sum_payloads
from .scales import MAX_SCALE, MIN_SCALE, float32, magnitude, root, rows_of, scale_bytes, spread, tree_sum

BLOCK_WORDS = 64  # words of one block


@dataclass(frozen=True)
class Ternary:
    """How ternary values are packed.

    Args:
        base: 3 (five digits a byte), or `2 W + 1`: the payloads of W workers are added as int32 vectors, and then decoded.
        bucket_size: elements that share a scale; None for the whole segment.

    Raises:
        ValueError: if `base` is even or below 3, or `bucket_size` is out of range.
    """

    base: int = 3
    bucket_size: int | None = None

    def __post_init__(self) -> None:
        if not 3 <= self.base < 2**30 or self.base % 2 == 0:
            raise ValueError(f"base: expected an odd number from 3 on (3, or 2 W + 1 for W workers), got {self.base}")
        check_bucket_size(self.size)

    @property
    def size(self) -> int:
        """Elements of a bucket, at most."""
        return MAX_SEGMENT_NUMEL if self.bucket_size is None else self.bucket_size

    @property
    def num_digits(self) -> int:
        """Digits that one word holds: 5 of base 3 in a byte, else as many as keep an int32 below 2^31.

        Example:
            >>> Ternary().num_digits, Ternary(base=9).num_digits, Ternary(base=17).num_digits
            (5, 9, 7)
        """
        if self.base == 3:
            return 5
        digits = 1
        while self.base ** (digits + 1) <= 2**31:
            digits += 1
        return digits

    def nbytes(self, numels: Sequence[int]) -> int:
        """Size of the packed values in bytes, without their scales: bytes for base 3, else int32 words.

        Raises:
            ValueError: if a segment's size is out of range.

        Example:
            >>> Ternary().nbytes([1000]), Ternary(base=9).nbytes([1000])
            (200, 448)
        """
        check_numels(numels)
        num_digits = self.num_digits
        return (1 if self.base == 3 else 4) * sum(-(-n // num_digits) for n in numels)


def scales(xs: Sequence[Tensor], clip: float = float("inf"), bucket_size: int | None = None) -> Tensor:
    """The largest magnitude of each bucket, at most `clip` standard deviations of its segment.

    Args:
        xs: segments of float32.
        clip: above 0; infinity clips nothing. A segment without variance is not clipped.
        bucket_size: elements that share a scale; None for the whole segment.

    Returns:
        float32 tensor, one for each bucket of all segments; infinite or NaN where the bucket is.

    Raises:
        ValueError: if `clip` or `bucket_size` is out of range or a segment has the wrong kind.

    Example:
        >>> scales([torch.tensor([1.0, -4.0, 2.0, 1.0])], clip=1.0)
        tensor([2.3452])
    """
    if not clip > 0:
        raise ValueError(f"clip: expected a number above 0, got {clip}")
    device = device_of(xs)
    checked = segments("xs", xs, device)
    num_scales = num_buckets(numels_of(xs), bucket_size)
    return _scales.on[device.type](checked, clip, bucket_size or MAX_SEGMENT_NUMEL, num_scales)


def encode(
    xs: Sequence[Tensor],
    scales: Tensor,
    out: Tensor,
    keys: Sequence[int],
    ternary: Ternary,
    residuals: Sequence[Tensor] | None = None,
) -> None:
    """Round each element stochastically to -1, 0 or 1 times its bucket's scale: `P(not 0) = |x| / scale`, at most 1.

    Args:
        xs: segments of float32.
        scales: float32, one for each bucket; from the function `scales`, or agreed upon by all workers.
        out: uint8 of `ternary.nbytes(numels)` bytes, written: the digits `value + 1`, packed in the base.
        keys: one 64-bit key per segment.
        ternary: the base and the buckets.
        residuals: where given, `x - value` is written here; may be `xs` itself.

    Where the scale is zero or not finite all values are 0; times a scale that is not finite they decode to NaN.

    Raises:
        ValueError: if a buffer has the wrong kind or size.

    Example:
        >>> x, ternary = torch.tensor([2.0, 0.0, -2.0]), Ternary()
        >>> scale, payload = scales([x]), torch.empty(ternary.nbytes([3]), dtype=torch.uint8)
        >>> encode([x], scale, payload, [7], ternary)
        >>> out = torch.zeros(3)
        >>> decode_add(payload, scale, [out], 1.0, ternary)
        >>> out
        tensor([ 2.,  0., -2.])
    """
    xs, out, residuals = checked_encoder(xs, out, ternary.nbytes(numels_of(xs)), residuals)
    check_length("keys", keys, len(xs))
    scales = _checked_scales(scales, xs, ternary, out.device)
    _encode.on[out.device.type](xs, scales, out, list(keys), ternary, residuals)


def decode_add(payload: Tensor, scales: Tensor, outs: Sequence[Tensor], weight: float, ternary: Ternary) -> None:
    """Add `weight` times the values of a payload, or of a sum of payloads, to `outs`.

    Args:
        payload: uint8, as `encode` wrote it with base 3; with base `2 W + 1` the int32 sum of W of them, viewed as bytes.
        scales: as given to `encode`.
        outs: float32 segments of the encoder's sizes, added to.
        weight: factor of all values.
        ternary: as given to `encode`.

    Raises:
        ValueError: if the payload's size does not fit the segments.
    """
    payload, outs = checked_payload(payload, outs, ternary.nbytes(numels_of(outs)))
    scales = _checked_scales(scales, outs, ternary, payload.device)
    _decode_add.on[payload.device.type](payload, scales, outs, weight, ternary)


def decode_sum(
    payloads: Sequence[Tensor], scales: Sequence[Tensor], outs: Sequence[Tensor], weight: float, ternary: Ternary
) -> Flag:
    """Overwrite `outs` with the sum of payloads: `decode_add` of each into zeros, on GPUs in one pass over memory.

    Args:
        payloads: one or more, as in `decode_add`.
        scales: those of each payload.
        outs: float32 segments of the encoder's sizes, overwritten.
        weight: factor of all values.
        ternary: as given to `encode`.

    Returns:
        Whether the whole result is finite: a `bool` in main memory, elsewhere a flag on the device.

    Raises:
        ValueError: if a payload's size does not fit the segments, or there is no payload.
    """
    checked, segments = checked_payloads(payloads, outs, ternary.nbytes(numels_of(outs)))
    device = checked[0].device
    checked_scales = [_checked_scales(s, outs, ternary, device) for s in scales]
    if len(checked_scales) != len(checked):
        raise ValueError(f"scales: expected one tensor for each of {len(checked)} payloads, got {len(checked_scales)}")
    return _decode_sum.on[device.type](checked, checked_scales, segments, weight, ternary)


def _checked_scales(scales: Tensor, xs: Sequence[Tensor], ternary: Ternary, device: torch.device) -> Tensor:
    expected = num_buckets(numels_of(xs), ternary.bucket_size)
    if scales.numel() != expected:
        raise ValueError(f"scales: expected one for each of {expected} buckets, got {scales.numel()}")
    return vector("scales", scales, torch.float32, device)


# ---- the reference ----


@kernel
def _scales(xs: list[Tensor], clip: float, bucket_size: int, num_scales: int) -> Tensor:
    scales = [torch.empty(0, dtype=torch.float32, device=device_of(xs))]
    for x in xs:
        if x.numel():
            largest = magnitude(rows_of(x, bucket_size)).amax(-1).view(torch.float32)
            clipped = torch.minimum(largest, _clip_limit(x, clip)).clamp(max=MAX_SCALE)
            clipped = torch.where(clipped < MIN_SCALE, torch.zeros_like(clipped), clipped)
            scales.append(torch.where(largest.isfinite(), clipped, largest))
    return scale_bytes(scales, scales[0].device).view(torch.float32)


@kernel
def _encode(
    xs: list[Tensor],
    scales: Tensor,
    out: Tensor,
    keys: list[int],
    ternary: Ternary,
    residuals: list[Tensor] | None,
) -> None:
    words = [torch.empty(0, dtype=torch.uint8, device=out.device)]
    for i, (x, scale) in enumerate(_with_scales(xs, scales, ternary.size)):
        values = _values(x, scale, keys[i])
        words.append(_pack_digits(values + 1, ternary))
        if residuals is not None:
            residuals[i].copy_(x - values.float() * scale)
    out.copy_(torch.cat(words))


@kernel
def _decode_add(payload: Tensor, scales: Tensor, outs: list[Tensor], weight: float, ternary: Ternary) -> None:
    factor = float32(weight, payload.device)
    for out, scale in _with_scales(outs, scales, ternary.size):
        words, payload = payload.tensor_split([ternary.nbytes([out.numel()])])
        digits = _unpack_digits(words, out.numel(), ternary)
        # Each of W workers has added 1 to the digit, and W is `base // 2`.
        out += (digits - ternary.base // 2).float() * (scale * factor)


@kernel
def _decode_sum(
    payloads: list[Tensor], scales: list[Tensor], outs: list[Tensor], weight: float, ternary: Ternary
) -> Flag:
    decode_add = _decode_add.on[payloads[0].device.type]

    def add(pair: tuple[Tensor, Tensor], outs: list[Tensor], weight: float) -> None:
        decode_add(*pair, outs, weight, ternary)

    return sum_payloads(add, list(zip(payloads, scales, strict=True)), outs, weight)


def _clip_limit(x: Tensor, clip: float) -> Tensor:
    """`clip` standard deviations of a segment; infinity where that is zero or not finite."""
    # Without the shift, a mean far from zero would cancel most digits of the variance.
    shifted = x.double() - x[0].double()
    count = torch.full((), x.numel(), dtype=torch.float64, device=x.device)
    total = tree_sum(shifted)
    variance = (tree_sum(shifted * shifted) - total * total / count) / count
    infinity = float32(float("inf"), x.device)
    return torch.where(variance.isfinite() & (variance > 0), float32(clip, x.device) * root(variance), infinity)


def _values(x: Tensor, scale: Tensor, key: int) -> Tensor:
    """-1, 0 or 1 for each element."""
    u, r = uniform_of(key, x.numel(), x.device), x * (torch.ones_like(scale) / scale)
    values = (u < r).int() - (u < -r).int()
    return torch.where(scale.isfinite() & (scale > 0), values, torch.zeros_like(values))


def _pack_digits(digits: Tensor, ternary: Ternary) -> Tensor:
    num_digits, num_whole = ternary.num_digits, _num_in_whole_blocks(digits.numel(), ternary)
    powers = torch.pow(ternary.base, torch.arange(num_digits, device=digits.device))
    whole, rest = digits[:num_whole].long(), digits[num_whole:].long()
    width = -(-rest.numel() // num_digits)
    padded = torch.nn.functional.pad(rest, (0, width * num_digits - rest.numel()))
    blocks = whole.view(-1, num_digits, BLOCK_WORDS), padded.view(1, num_digits, width)
    words = torch.cat([(block * powers[:, None]).sum(1).flatten() for block in blocks])
    return words.to(torch.uint8 if ternary.base == 3 else torch.int32).view(torch.uint8)


def _unpack_digits(payload: Tensor, numel: int, ternary: Ternary) -> Tensor:
    base, num_words = ternary.base, _num_in_whole_blocks(numel, ternary) // ternary.num_digits
    # A copy, because a payload may start at any address. Masked, because a corrupt word may be negative.
    words = payload.long() if base == 3 else payload.clone().view(torch.int32).long() & MASK32
    digits = []
    for word in (words[:num_words].view(-1, BLOCK_WORDS), words[num_words:].unsqueeze(0)):
        blocks = []
        for _ in range(ternary.num_digits):
            # The half keeps the rounded product from falling below a whole quotient.
            quotient = ((word.double() + 0.5) * (1.0 / base)).floor().long()
            blocks.append(word - quotient * base)
            word = quotient
        digits.append(torch.stack(blocks, 1).flatten())
    return torch.cat(digits)[:numel]


def _num_in_whole_blocks(numel: int, ternary: Ternary) -> int:
    """Elements of a segment that lie in blocks of full length; those after them are one shorter block. See docs/wire.md."""
    return numel - numel % (BLOCK_WORDS * ternary.num_digits)


def _with_scales(xs: list[Tensor], scales: Tensor, bucket_size: int) -> Iterable[tuple[Tensor, Tensor]]:
    """Each segment with the scale of each of its elements."""
    parts = bit.split(scales, [-(-x.numel() // bucket_size) for x in xs])
    return [(x, spread(part, bucket_size, x)) for x, part in zip(xs, parts, strict=True)]
