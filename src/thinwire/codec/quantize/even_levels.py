"""Codecs whose payload is what `kernels.quantize` writes: evenly spaced levels, and a scale for each bucket."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from ... import kernels
from ...kernels import Flag
from ...kernels.quantize import Quantizer, Quantizers
from ..base import Codec
from ..traits import Traits


class EvenLevels(Codec):
    """Rounds stochastically to evenly spaced levels."""

    @property
    @abstractmethod
    def quantizers(self) -> Quantizers:
        """The levels and the buckets of each segment."""

    def encode_segments(self, segments: list[Tensor], keys: list[int], residuals: list[Tensor] | None) -> Tensor:
        payload = self._empty_payload(segments)
        kernels.quantize.encode(segments, payload, keys, self.quantizers, residuals)
        return payload

    def decode_add_segments(self, payload: Tensor, outs: list[Tensor], weight: float, keys: list[int]) -> None:
        kernels.quantize.decode_add(payload, outs, weight, self.quantizers)

    def decode_sum_segments(self, payloads: list[Tensor], outs: list[Tensor], weight: float, keys: list[int]) -> Flag:
        return kernels.quantize.decode_sum(payloads, outs, weight, self.quantizers)

    def segments_nbytes(self, numels: list[int]) -> int:
        return self.quantizers.nbytes(numels)


@dataclass(frozen=True, repr=False)
class EvenLevelsOfEach(EvenLevels):
    """Segment i has the levels of `each[i]`; one call of the kernels serves all of them.

    Payload: that of each distinct quantizer, in the order of its first segment, for all its segments together.

    Args:
        each: a quantizer for each segment.
    """

    each: tuple[Quantizer, ...]

    @cached_property
    def traits(self) -> Traits:
        return Traits(unbiased=True, by_layer=True)

    @cached_property
    def quantizers(self) -> Quantizers:
        return Quantizers.of(self.each)
