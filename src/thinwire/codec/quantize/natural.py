"""Natural compression: every element becomes one of the two powers of two around it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ... import kernels
from ..base import Codec
from ..traits import Traits

_BITS = 9  # sign and exponent
_MANTISSA, _MANTISSA_BITS = 0x7FFFFF, 23
_INFINITE = 255  # the exponent of what is not finite


@dataclass(frozen=True, repr=False)
class NaturalCompression(Codec):
    """Rounds each magnitude to a power of two at random: sign and exponent, 9 bits an element, and no scale.

        C(x) = sign(x) 2^(k + 1) with probability |x| / 2^k - 1, else sign(x) 2^k,   2^k <= |x| < 2^(k + 1)

    Unbiased, with variance `E|C(x) - x|^2 <= |x|^2 / 8`. The payload has `ceil(9 n / 8)` bytes a segment. Below 2^-126 an
    element becomes 2^-126 or 0, and from 2^127 on it becomes 2^127, so that nothing finite overflows. What is not finite
    decodes to an infinity.

    Source: Horvath et al. 2019, Natural compression for distributed deep learning, arXiv 1905.10988.

    Example:
        >>> import torch, thinwire as tw
        >>> codec = tw.codec.NaturalCompression()
        >>> codec.nbytes(1000)
        1125
        >>> codec.decode(codec.encode(torch.tensor([4.0, -0.5, 0.0])), 3)  # powers of two keep their value
        tensor([ 4.0000, -0.5000,  0.0000])
    """

    traits = Traits(unbiased=True)

    def encode_segments(self, segments: list[Tensor], keys: list[int], residuals: list[Tensor] | None) -> Tensor:
        payload = self._empty_payload(segments)
        parts = payload.split([kernels.words.nbytes(x.numel(), _BITS) for x in segments])
        for i, (x, key, part) in enumerate(zip(segments, keys, parts, strict=True)):
            words = _rounded(x, key)
            kernels.words.encode(words, [words.numel()], _BITS, part)
            if residuals is not None:
                torch.sub(x, _values(words), out=residuals[i])
        return payload

    def decode_add_segments(self, payload: Tensor, outs: list[Tensor], weight: float, keys: list[int]) -> None:
        parts = payload.split([kernels.words.nbytes(out.numel(), _BITS) for out in outs])
        for out, part in zip(outs, parts, strict=True):
            kernels.mix.add([out], _values(kernels.words.decode(part, [out.numel()], _BITS)), own_weight=weight)

    def segments_nbytes(self, numels: list[int]) -> int:
        return sum(kernels.words.nbytes(n, _BITS) for n in numels)

    def section_nbytes(self, size: int) -> tuple[int, ...]:
        return (kernels.words.nbytes(size, _BITS),)


def _rounded(x: Tensor, key: int) -> Tensor:
    """The words, int32: the exponent that rounding chose, and the sign above it."""
    bits = x.view(torch.int32)
    exponent, sign = (bits >> _MANTISSA_BITS) & 0xFF, (bits >> 31) & 1
    # 23 random bits, as many as the mantissa has, so that the probability is exact.
    draw = (kernels.uniform(key, x.numel(), x.device) * 2.0**_MANTISSA_BITS).int()
    # Exponent 0 decodes to zero, so a subnormal becomes 0 or 2^-126. What is finite stays finite.
    rounded = (exponent + ((bits & _MANTISSA) > draw)).clamp(max=_INFINITE - 1)
    return (torch.where(exponent == _INFINITE, exponent, rounded) | (sign << 8)).int()


def _values(words: Tensor) -> Tensor:
    """The float32 powers of two that the words name."""
    sign, exponent = words >> 8, words & 0xFF
    return ((exponent << _MANTISSA_BITS) | (sign << 31)).int().view(torch.float32)
