"""Sparsifiers by magnitude, of variable size: a fixed threshold, or a fraction of the largest magnitude."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ... import kernels
from ...options import require_number
from ...schedule import Schedule
from ..types import Selection, number
from .base import Sparsifier

_SMALLEST = 2.0**-149  # the smallest positive float32; zeros are never worth sending


class _ByMagnitude(Sparsifier):
    """Keeps elements whose magnitude reaches a threshold: possibly none, possibly all."""

    counts_travel: ClassVar[bool] = True
    codes_plainly: ClassVar[bool] = True

    def count(self, numel: int) -> int:
        return numel

    def select(self, segments: list[Tensor], keys: list[int]) -> Selection:
        return Selection(*kernels.select.above(segments, self.thresholds(segments)))

    @abstractmethod
    def thresholds(self, segments: list[Tensor]) -> list[float]:
        """The threshold of each segment."""


@dataclass(frozen=True, repr=False)
class Threshold(_ByMagnitude):
    """Keeps all `|x_i| >= value`; the size of the payload depends on the data.

    Biased: use it with a memory such as `ErrorFeedback`. Check: `max |x - C(x)| < value`. If the values and indices of
    a segment take more bytes than the whole segment, it is sent whole. So a payload exceeds the dense size by at most
    four bytes a segment.

    Args:
        value: lowest magnitude that is sent, in the units of the tensor; higher => smaller messages.

    Raises:
        ValueError: value not positive.

    Source: Strom 2015, "Scalable distributed DNN training using commodity GPU cloud computing", Interspeech; Dutta et
    al. 2020, arXiv 1911.08250.

    Example:
        >>> import torch, thinwire as tw
        >>> codec = tw.Threshold(value=0.5)
        >>> payload = codec.encode(torch.tensor([0.1, -0.5, 0.0, 0.0, 0.7, 0.2, 0.2, 0.3]))
        >>> payload.numel()  # two values, a byte for their indices, four for their number
        13
        >>> codec.decode(payload, 8)
        tensor([ 0.0000, -0.5000,  0.0000,  0.0000,  0.7000,  0.0000,  0.0000,  0.0000])
    """

    value: float | Schedule = 0.001

    def __post_init__(self) -> None:
        require_number("Threshold: value", self.value, above=0, or_schedule=True)

    def under_scale(self, factor: float) -> Threshold:
        return Threshold(number(self.value) * factor)

    def thresholds(self, segments: list[Tensor]) -> list[float]:
        return [max(number(self.value), _SMALLEST)] * len(segments)


@dataclass(frozen=True, repr=False)
class AdaptiveThreshold(_ByMagnitude):
    """Keeps `|x_i| >= fraction * max_j |x_j|` of each segment; the size of the payload depends on the data.

    Biased: use it with a memory such as `ErrorFeedback`. At least one element is kept, but none if all are zero.

    Args:
        fraction: of the largest magnitude, in (0, 1]; higher => smaller messages.

    Raises:
        ValueError: fraction out of range.

    Source: Dryden et al. 2016, "Communication quantization for data-parallel training of deep neural networks", MLHPC;
    Chen et al. 2018, AdaComp, arXiv 1712.02679.

    Example:
        >>> import torch, thinwire as tw
        >>> codec = tw.AdaptiveThreshold(fraction=0.5)
        >>> codec.decode(codec.encode(torch.tensor([0.1, -4.0, 2.0, 1.9])), 4)
        tensor([ 0., -4.,  2.,  0.])
    """

    fraction: float | Schedule = 0.5

    def __post_init__(self) -> None:
        require_number("AdaptiveThreshold: fraction", self.fraction, above=0, most=1, or_schedule=True)

    def thresholds(self, segments: list[Tensor]) -> list[float]:
        largest = kernels.select.largest(segments)
        fraction = number(self.fraction)
        # With an infinity or NaN in the segment, keep exactly the elements that are not finite.
        return [max(fraction * m, _SMALLEST) if math.isfinite(m) else math.inf for m in largest]
