"""Dynamic 8-bit numbers: exponents of ten and fractions share the bits, so that small numbers keep some precision."""

from __future__ import annotations

from dataclasses import dataclass

from .checks import check_buckets
from .levels import LevelCodec

_EXPONENTS = 7  # 64 + 32 + ... + 1 = 127 magnitudes: with both signs and zero, 255 levels


def _magnitudes() -> tuple[float, ...]:
    """With exponent e, the middles of 2^(6 - e) equal parts of [0.1, 1], times 10^-e; descending, the largest made 1."""
    found = []
    for e in range(_EXPONENTS):
        parts = 2 ** (_EXPONENTS - 1 - e)
        found += [(0.1 + 0.9 * (i + 0.5) / parts) * 10.0**-e for i in range(parts)]
    return (1.0, *sorted(found, reverse=True)[1:])


_LEVELS = _magnitudes()


@dataclass(frozen=True, repr=False)
class Dynamic8(LevelCodec):
    """Stochastic rounding to dynamic 8-bit numbers: zero and 127 magnitudes of both signs, times the bucket's scale.

    The bits after the sign say the exponent by their leading zeros, e of them for 10^-e, and the rest is a linear fraction:
    64 magnitudes lie between 0.1 and 1, 32 between 0.01 and 0.1, and so on to one of 5.5e-7. So numbers of all sizes from
    1e-6 on have some precision, at 8 bits an element and 4 bytes a bucket. An element between two magnitudes l < h has
    variance `(h - r)(r - l)`, as in `Quantize`. The largest magnitude is 1 instead of 0.993, so that the codec is unbiased.

    Args:
        bucket_size: elements that share a scale; larger => fewer scale bytes, more noise.
        norm: "max" (the largest magnitude) or "l2".

    Raises:
        ValueError: a field out of range.

    Source: Dettmers 2015, 8-bit approximations for parallelism in deep learning, arXiv 1511.04561; in blocks, Dettmers et al.
        2021, arXiv 2110.02861.

    Example:
        >>> import torch, thinwire as tw
        >>> codec = tw.codec.Dynamic8()
        >>> len(codec.level_values), codec.nbytes(2048)
        (255, 2052)
        >>> codec.decode(codec.encode(torch.tensor([8.0, -8.0, 0.0])), 3)
        tensor([ 8., -8.,  0.])
    """

    bucket_size: int = 2048
    norm: str = "max"

    def __post_init__(self) -> None:
        check_buckets("Dynamic8", self.bucket_size, self.norm)

    @property
    def level_values(self) -> tuple[float, ...]:
        """The levels, ascending in [-1, 1]."""
        return (*(-m for m in _LEVELS), 0.0, *reversed(_LEVELS))
