"""Floating-point numbers of four bits, with a scale for each bucket."""

from __future__ import annotations

from dataclasses import dataclass

from ...options import require_choice
from .checks import check_buckets
from .levels import LevelCodec

_MAGNITUDES = {
    "e2m1": (1 / 12, 1 / 6, 1 / 4, 1 / 3, 1 / 2, 2 / 3, 1.0),  # 0.5, 1, 1.5, 2, 3, 4, 6 in units of 6
    "e3m0": (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0),
}


@dataclass(frozen=True, repr=False)
class Float4(LevelCodec):
    """Stochastic rounding to floats of 4 bits: zero and 7 magnitudes of both signs, times the bucket's scale.

        "e3m0"   0, +-2^-6, +-2^-5, ..., +-1/2, +-1               three bits of exponent
        "e2m1"   0, +-0.5, +-1, +-1.5, +-2, +-3, +-4, +-6, in units of 6    two bits of exponent, one of mantissa

    An element is rounded to one of its two neighbours so that its mean is kept, as in `Quantize`. Four bits an element and 4
    bytes a bucket. An element between two magnitudes l < h has variance `(h - r)(r - l)`, so "e3m0" is better where few
    elements are large, and "e2m1" where many are.

    Args:
        format: "e3m0" or "e2m1".
        bucket_size: elements that share a scale; larger => fewer scale bytes, more noise.
        norm: "max" (the largest magnitude) or "l2".

    Raises:
        ValueError: an unknown format, or a field out of range.

    Source: Douillard et al. 2025, Streaming DiLoCo, arXiv 2501.18512 (E3M0); Open Compute Project, Microscaling formats
        (E2M1).

    Example:
        >>> import torch, thinwire as tw
        >>> codec = tw.codec.Float4()
        >>> codec.nbytes(512)
        260
        >>> codec.decode(codec.encode(torch.tensor([8.0, -2.0, 0.125])), 3)
        tensor([ 8.0000, -2.0000,  0.1250])
    """

    format: str = "e3m0"
    bucket_size: int = 512
    norm: str = "max"

    def __post_init__(self) -> None:
        require_choice("Float4: format", self.format, _MAGNITUDES)
        check_buckets("Float4", self.bucket_size, self.norm)

    @property
    def level_values(self) -> tuple[float, ...]:
        """The levels, ascending in [-1, 1]."""
        magnitudes = _MAGNITUDES[self.format]
        return (*(-m for m in reversed(magnitudes)), 0.0, *magnitudes)
