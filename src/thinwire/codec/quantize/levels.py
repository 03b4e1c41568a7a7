"""Stochastic quantization to levels that are not evenly spaced."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from ... import kernels
from ...kernels import Flag
from ...options import require_integer, require_number
from ...schedule import Schedule, extremes
from ..base import Codec
from ..traits import Traits
from ..types import Symbols, number
from .checks import check_buckets


class LevelCodec(Codec):
    """Quantizes to `level_values` times each bucket's scale; subclasses have the fields `bucket_size` and `norm`.

    It is unbiased if the levels reach from -1 to 1.
    """

    bucket_size: int
    norm: str

    @cached_property
    def traits(self) -> Traits:
        return Traits(unbiased=True, bucket_size=self.bucket_size)

    @property
    @abstractmethod
    def level_values(self) -> tuple[float, ...]:
        """The levels, ascending in [-1, 1]."""

    @cached_property
    def _levels(self) -> kernels.levels.Levels:
        return kernels.levels.Levels(self.level_values, self.bucket_size, self.norm)

    def symbols(self, numels: list[int]) -> Symbols:
        return Symbols(kernels.levels.levels_bits(len(self.level_values)), numels)

    def encode_segments(self, segments: list[Tensor], keys: list[int], residuals: list[Tensor] | None) -> Tensor:
        payload = self._empty_payload(segments)
        kernels.levels.encode(segments, payload, keys, self._levels, residuals)
        return payload

    def decode_add_segments(self, payload: Tensor, outs: list[Tensor], weight: float, keys: list[int]) -> None:
        kernels.levels.decode_add(payload, outs, weight, self._levels)

    def decode_sum_segments(self, payloads: list[Tensor], outs: list[Tensor], weight: float, keys: list[int]) -> Flag:
        return kernels.levels.decode_sum(payloads, outs, weight, self._levels)

    def segments_nbytes(self, numels: list[int]) -> int:
        return self._levels.nbytes(numels)

    def section_nbytes(self, size: int) -> tuple[int, ...]:
        return self._head_and_rest(4 * kernels.num_buckets([size], self.bucket_size), size)


def level_values(codec: Codec) -> tuple[float, ...] | None:
    """The levels that a codec or one of its parts rounds to, ascending in [-1, 1]; None without such levels."""
    if isinstance(codec, LevelCodec):
        return codec.level_values
    return next((found for part in codec.parts() if (found := level_values(part)) is not None), None)


@dataclass(frozen=True, repr=False)
class Quantize(LevelCodec):
    """Stochastic quantization to any set of levels: `ceil(log2(number of levels))` bits an element, a scale a bucket.

    An element r, in units of its bucket's scale, is rounded to one of its two neighbouring levels `l <= r < h`:

        C(r) = h if u (h - l) < r - l else l,   u ~ U[0, 1)

    Between the outer levels the mean of C(r) is r. An element beyond them is rounded to the nearer one, so the codec is
    unbiased if the outer levels are -1 and 1. An element at a level keeps its value. The variance of one element is
    `(h - r)(r - l)`. Zero is a level only if it is one of `levels`.

    Args:
        levels: 2 to 256 numbers in [-1, 1], ascending; up to 16 are fastest. More => larger messages, less noise.
        bucket_size: elements that share a scale; larger => fewer scale bytes (4 a bucket), more noise.
        norm: "max" (the largest magnitude) or "l2".

    Raises:
        ValueError: a field out of range.

    Source: Faghri et al. 2020, Adaptive gradient quantization, arXiv 2010.12460.

    Example:
        >>> import torch, thinwire as tw
        >>> codec = tw.codec.Quantize(levels=(-1.0, -0.25, 0.25, 1.0))
        >>> codec.nbytes(512)  # a scale, and two bits an element
        132
        >>> codec.decode(codec.encode(torch.tensor([8.0, 2.0, -2.0])), 3)
        tensor([ 8.,  2., -2.])
    """

    levels: tuple[float, ...]
    bucket_size: int = 512
    norm: str = "max"

    def __post_init__(self) -> None:
        # The dataclass is frozen, and lists and integers are taken too.
        object.__setattr__(self, "levels", tuple(float(level) for level in self.levels))
        kernels.levels.checked_levels(self.levels)
        check_buckets("Quantize", self.bucket_size, self.norm)

    @property
    def level_values(self) -> tuple[float, ...]:
        return self.levels

    @cached_property
    def traits(self) -> Traits:
        unbiased = (self.levels[0], self.levels[-1]) == (-1.0, 1.0)
        return Traits(unbiased=unbiased, bucket_size=self.bucket_size)


@dataclass(frozen=True, repr=False)
class NUQSGD(LevelCodec):
    """Stochastic quantization to levels spaced by a factor: `0, +-p^s, ..., +-p^2, +-p, +-1`, times the scale.

    Without `zero`, the levels are `+-p^s, ..., +-p, +-1` with `s + 1 = 2^(b-1)`, as in the ALQ paper's experiments.

    `b` bits can name `s + 1 = 2^(b-1) - 1` magnitudes and zero. Most elements of a gradient are near zero, where these
    levels are dense. Check, for p = 1/2, the L2 scale and bucket size d: an element between two magnitudes has variance
    at most r^2 / 8, one below all of them at most p^(2s) / 4, so `E|C(x)-x|^2 <= (1/8 + d p^(2s) / 4) |x|^2`.

    Args:
        bits: bits an element, 2 to 8; lower => smaller messages, more noise. May be a schedule.
        multiplier: p, in (0, 1); lower => levels reach closer to zero, and are farther apart.
        bucket_size: elements that share a scale; larger => fewer scale bytes (4 a bucket), more noise.
        norm: "l2" as in the paper, or "max".
        zero: whether zero is a level.

    Raises:
        ValueError: a field out of range, or so many levels that the smallest are not distinct in float32.

    Source: Ramezani-Kebrya et al. 2019, NUQSGD, arXiv 1908.06077.

    Example:
        >>> import thinwire as tw
        >>> tw.NUQSGD(bits=3).level_values
        (-1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0)
    """

    bits: int | Schedule = 4
    multiplier: float = 0.5
    bucket_size: int = 512
    norm: str = "l2"
    zero: bool = True

    def __post_init__(self) -> None:
        require_integer("NUQSGD: bits", self.bits, 2, 8, or_schedule=True)
        require_number("NUQSGD: multiplier", self.multiplier, above=0, below=1)
        check_buckets("NUQSGD", self.bucket_size, self.norm)
        if isinstance(self.bits, int):
            kernels.levels.checked_levels(self.level_values)
        for bits in extremes(self.bits):
            replace(self, bits=int(bits))  # refuses what is refused without a schedule

    @property
    def level_values(self) -> tuple[float, ...]:
        """The levels, ascending in [-1, 1]."""
        magnitudes = [self.multiplier**j for j in range(2 ** (number(self.bits) - 1) - int(self.zero))]
        zeros = [0.0] if self.zero else []
        return (*(-m for m in magnitudes), *zeros, *reversed(magnitudes))
