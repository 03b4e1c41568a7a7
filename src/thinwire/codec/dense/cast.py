"""Dense codecs: float32 elements as they are, or rounded to a shorter float type."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ... import kernels
from ...kernels import Flag
from ...options import require_choice
from ..base import Codec
from ..traits import Traits


@dataclass(frozen=True, repr=False)
class Identity(Codec):
    """Sends every element as float32: `C(x) = x`, 32 bits an element. The dense baseline.

    Example:
        >>> import torch, thinwire as tw
        >>> tw.codec.Identity().nbytes(1000)
        4000
    """

    traits = Traits(unbiased=True, lossless=True, sum_dtype=torch.float32, sends_floats=True)

    def encode_segments(self, segments: list[Tensor], keys: list[int], residuals: list[Tensor] | None) -> Tensor:
        # `cat` copies a single segment too, so that a residual in the same memory can be cleared.
        payload = torch.cat(segments).view(torch.uint8)
        if residuals:
            torch._foreach_zero_(residuals)
        return payload

    def decode_add_segments(self, payload: Tensor, outs: list[Tensor], weight: float, keys: list[int]) -> None:
        kernels.mix.add(outs, kernels.payload_as(payload, torch.float32), own_weight=weight)

    def segments_nbytes(self, numels: list[int]) -> int:
        return 4 * sum(numels)

    def section_nbytes(self, size: int) -> tuple[int, ...]:
        return (4 * size,)


@dataclass(frozen=True, repr=False)
class Cast(Codec):
    """Sends every element rounded to a shorter float type, 16 or 8 bits an element.

    Rounding is to nearest even. A finite element beyond float16's range (65504) becomes infinite, and so does a sum on
    the wire, as in `Mean(Cast("float16"))` by an all-reduce: such a step or round is skipped with a warning, as any that is not
    finite. `exchange="scatter_reduce"` adds in float32, with the same bytes. bfloat16 has float32's range.

    The 8-bit types scale each segment, so that nothing overflows and little underflows. The scale is a power of two,
    sent as a float32, that moves the segment's largest magnitude to the top of the type's range (448 for e4m3fn, 57344
    for e5m2). Such payloads are not summable. If an element is not finite, the scale is not finite either, and the
    segment decodes to NaN, because e4m3fn has no infinity.

    Args:
        dtype: "bfloat16" (8 exponent bits, 8 bits of precision), "float16" (5 and 11), "float8_e4m3fn" (4 and 4) or
            "float8_e5m2" (5 and 3).

    Raises:
        ValueError: another type.

    Example:
        >>> import torch, thinwire as tw
        >>> codec = tw.Cast("bfloat16")
        >>> codec.decode(codec.encode(torch.tensor([1.0, 0.1])), 2)
        tensor([1.0000, 0.1001])
    """

    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        names = list(kernels.cast.WIDTHS)
        require_choice("Cast: dtype", self.dtype, names)

    @cached_property
    def traits(self) -> Traits:
        return Traits(sum_dtype=getattr(torch, self.dtype) if kernels.cast.WIDTHS[self.dtype] == 2 else None)

    def encode_segments(self, segments: list[Tensor], keys: list[int], residuals: list[Tensor] | None) -> Tensor:
        payload = self._empty_payload(segments)
        kernels.cast.encode(segments, payload, self.dtype, residuals)
        return payload

    def decode_add_segments(self, payload: Tensor, outs: list[Tensor], weight: float, keys: list[int]) -> None:
        kernels.cast.decode_add(payload, outs, weight, self.dtype)

    def decode_sum_segments(self, payloads: list[Tensor], outs: list[Tensor], weight: float, keys: list[int]) -> Flag:
        return kernels.cast.decode_sum(payloads, outs, weight, self.dtype)

    def segments_nbytes(self, numels: list[int]) -> int:
        return kernels.cast.nbytes(numels, self.dtype)

    def section_nbytes(self, size: int) -> tuple[int, ...]:
        return self._head_and_rest(self.segments_nbytes([0]), size)  # the scale of a type of 8 bits
