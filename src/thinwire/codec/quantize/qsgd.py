"""Stochastic uniform quantization."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from ... import kernels
from ...algorithm import require
from ...kernels.checks import MAX_SEGMENT_NUMEL
from ...kernels.quantize import Quantizer, Quantizers
from ...options import require_integer
from ...schedule import Schedule, extremes
from ..traits import Traits
from ..types import Symbols, number
from .checks import check_buckets
from .even_levels import EvenLevels


@dataclass(frozen=True, repr=False)
class QSGD(EvenLevels):
    """Stochastic uniform quantization to `bits` bits an element, one scale a bucket.

    Each bucket of `bucket_size` consecutive elements of a segment has a float32 scale: its largest magnitude ("max",
    the QSGDinf of the paper) or its L2 norm ("l2"). An element is rounded at random to one of its two neighbouring
    levels `scale * (2c - m) / m`, `c = 0..m`, with probabilities that keep the mean:

        c = floor((x / scale * m + m) / 2 + u),   u ~ U[0, 1)

    With `zero` there are `m = 2^bits - 2` steps, so zero is a level and zeros stay zeros, as in the paper. This is the
    default, because most elements of a gradient are near zero. Without `zero`, `m = 2^bits - 1` uses every code. One
    bit has only the two levels -scale and scale, and needs `zero=False`.

    Check: with the L2 scale, `s = m / 2` levels per sign and bucket size d,
    `E|C(x)-x|^2 <= min(d/s^2, sqrt(d)/s) |x|^2`.

    `levels = s` is the paper's own parameter: s levels per sign and zero, so `m = 2s`. An element takes
    `ceil(log2(2s + 1))` bits. The layer-wise setting of the paper has s = 255.

    Args:
        bits: bits an element, 1 to 8; lower => smaller messages, more noise. May be a schedule.
        bucket_size: elements that share a scale; larger => fewer scale bytes (4 a bucket), more noise. None: all elements
            of a segment, which at `granularity="model"` is the entire model.
        norm: "max" or "l2".
        zero: whether zero is a level.
        levels: s, in place of `bits`: 1 to 32767. May be a schedule.

    Raises:
        ValueError: a field out of range, or both or neither of `bits` and `levels`.

    Source: Alistarh et al. 2017, QSGD, arXiv 1610.02132.

    Example:
        >>> import torch, thinwire as tw
        >>> codec = tw.QSGD(bits=4)
        >>> codec.nbytes(1024)  # two scales, and half a byte an element
        520
        >>> codec.decode(codec.encode(torch.tensor([7.0, 0.0, -1.0])), 3)
        tensor([ 7.,  0., -1.])
    """

    bits: int | Schedule | None = None
    bucket_size: int | None = 512
    norm: str = "max"
    zero: bool = True
    levels: int | Schedule | None = None

    def __post_init__(self) -> None:
        require(
            (self.bits is None) != (self.levels is None),
            f"QSGD: give either bits or levels, such as bits=4, got bits={self.bits!r} and levels={self.levels!r}",
        )
        # So many levels take codes of 16 bits.
        for name, most in (("bits", 8), ("levels", 2**15 - 1)):
            if getattr(self, name) is not None:
                require_integer(f"QSGD: {name}", getattr(self, name), 1, most, or_schedule=True)
        check_buckets("QSGD", self.bucket_size, self.norm, or_none=True)
        require(self.bits != 1 or not self.zero, "QSGD: one bit has no room for a zero level; add zero=False")
        require(
            self.levels is None or self.zero, "QSGD: levels include zero; give bits instead of levels with zero=False"
        )
        for bits in extremes(self.bits):
            replace(self, bits=int(bits))  # refuses what is refused without a schedule

    @property
    def code_bits(self) -> int:
        """Bits an element."""
        return self.num_steps.bit_length()

    @property
    def num_steps(self) -> int:
        """Number of steps from -scale to scale: the levels less one."""
        if self.levels is not None:
            return 2 * number(self.levels)
        assert self.bits is not None, "either bits or levels is given"
        return int(2 ** number(self.bits)) - (2 if self.zero else 1)

    @cached_property
    def traits(self) -> Traits:
        scheduled = isinstance(self.bits, Schedule) or isinstance(self.levels, Schedule)
        # A schedule has no number of levels yet.
        quantizer = None if scheduled else self.quantizers.distinct[0]
        return Traits(unbiased=True, bucket_size=self.bucket_size, quantizer=quantizer)

    @cached_property
    def quantizers(self) -> Quantizers:
        # No segment is larger, so that each is one bucket.
        bucket_size = MAX_SEGMENT_NUMEL if self.bucket_size is None else self.bucket_size
        return Quantizers((Quantizer(self.code_bits, self.num_steps, bucket_size, self.norm),))

    def symbols(self, numels: list[int]) -> Symbols | None:
        return None if self.code_bits > 8 else Symbols(self.code_bits, numels)

    def section_nbytes(self, size: int) -> tuple[int, ...]:
        return self._head_and_rest(4 * kernels.num_buckets([size], self.bucket_size), size)
