"""Dense codecs: the floats themselves, or the same floats in fewer bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..algorithm import require
from .base import Codec

_CAST_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}


@dataclass(frozen=True, repr=False)
class Identity(Codec):
    """Sends every element as float32: `C(x) = x`, 32 bits an element. The dense baseline.

    Example:
        >>> import torch, thinwire as tw
        >>> tw.Identity().nbytes(1000)
        4000
    """

    unbiased: ClassVar[bool] = True

    @property
    def lossless(self) -> bool:
        return True

    @property
    def sum_dtype(self) -> torch.dtype:
        return torch.float32

    def _encode(self, segments: list[Tensor], keys: list[int], residuals: list[Tensor] | None) -> Tensor:
        payload = torch.cat(segments).view(torch.uint8)
        for r in residuals or []:
            r.zero_()
        return payload

    def _decode_add(self, payload: Tensor, outs: list[Tensor], weight: float) -> None:
        _add_parts(payload.view(torch.float32), outs, weight)

    def _nbytes(self, numels: list[int]) -> int:
        return 4 * sum(numels)


@dataclass(frozen=True, repr=False)
class Cast(Codec):
    """Sends every element rounded to a shorter float type, 16 or 8 bits an element.

    Rounding is to nearest even. A finite element beyond float16's range (65504) becomes infinite, and so does a sum on
    the wire; bfloat16 has float32's range.

    The 8-bit types have a range of their own for each segment, so that nothing overflows and as little as possible
    underflows: a power of two, sent as a float32, scales the segment's largest magnitude into the top of the type's
    range (448 for e4m3fn, 57344 for e5m2). Such payloads are not summable. If an element is not finite, neither is the
    scale, and the segment decodes to NaN: e4m3fn has no infinity.

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

    def __post_init__(self):
        require(self.dtype in _CAST_DTYPES, f"Cast: dtype must be one of {list(_CAST_DTYPES)}, got {self.dtype!r}")

    @property
    def sum_dtype(self) -> torch.dtype | None:
        return None if self._scaled else self._wire_dtype

    @property
    def _wire_dtype(self) -> torch.dtype:
        return _CAST_DTYPES[self.dtype]

    @property
    def _scaled(self) -> bool:
        return self._wire_dtype.itemsize == 1

    def _encode(self, segments: list[Tensor], keys: list[int], residuals: list[Tensor] | None) -> Tensor:
        payload = torch.empty(self._nbytes([s.numel() for s in segments]), dtype=torch.uint8, device=segments[0].device)
        scales, parts = self._split(payload, segments)
        for x, scale, part in zip(segments, scales, parts, strict=True):
            if self._scaled:
                scale.copy_(_power_of_two(x, torch.finfo(self._wire_dtype).max))
                part.copy_(x / scale)
            else:
                part.copy_(x)
        for x, scale, part, r in zip(segments, scales, parts, residuals or [], strict=False):
            torch.sub(x, part.float() * scale if self._scaled else part, out=r)
        return payload

    def _decode_add(self, payload: Tensor, outs: list[Tensor], weight: float) -> None:
        if not self._scaled:
            return _add_parts(payload.view(self._wire_dtype), outs, weight)
        for out, scale, part in zip(outs, *self._split(payload.clone(), outs), strict=True):
            out.add_(part.float().mul_(scale), alpha=weight)

    def _split(self, payload: Tensor, segments: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Views of the scales (float32, empty for each segment where there are none) and of the elements."""
        count = 4 * len(segments) if self._scaled else 0
        values = payload[count:].view(self._wire_dtype).split([s.numel() for s in segments])
        scales = payload[:count].view(torch.float32) if self._scaled else payload.new_empty(len(segments))
        return scales, list(values)

    def _nbytes(self, numels: list[int]) -> int:
        return self._wire_dtype.itemsize * sum(numels) + (4 * len(numels) if self._scaled else 0)


def _power_of_two(x: Tensor, largest: float) -> Tensor:
    """The least power of two by which `x` divided is at most `largest`; 1 for zero, and not finite if x is not."""
    most = x.abs().amax() if x.numel() else x.new_zeros(())
    mantissa, exponent = torch.frexp(most / largest)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-126, 127)
    scale = torch.ldexp(torch.ones_like(most), exponent)
    return torch.where(most.isfinite(), torch.where(most > 0, scale, torch.ones_like(scale)), most)


def _add_parts(values: Tensor, outs: list[Tensor], weight: float) -> None:
    for out, part in zip(outs, values.split([o.numel() for o in outs]), strict=True):
        out.add_(part, alpha=weight)
