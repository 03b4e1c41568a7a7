"""Quantize complete buckets, and send the elements that are left as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ... import kernels
from ...algorithm import require
from ...options import require_kind
from ..base import Codec
from ..traits import Traits
from ..types import Key
from .wrapper import Wrapper


@dataclass(frozen=True, repr=False)
class DenseLast(Wrapper):
    """Encodes the complete buckets of each segment with a codec, and sends the elements after them as float32.

    A last bucket that is short has a scale of its own for few elements. The quantizers of the ALQ paper leave it exact:

        C(x) = [codec(x[:m]), x[m:]],   m = n - n mod bucket_size

    Bytes: those of the codec for m elements, and `4 (n mod bucket_size)`, for each segment of n elements.

    Args:
        codec: one with buckets, such as `QSGD(bits=4, bucket_size=8192)`.

    Raises:
        ValueError: a codec that has no buckets, or needs an agreement.

    Source: Faghri et al. 2020, Adaptive gradient quantization, arXiv 2010.12460, in the authors' implementation.

    Example:
        >>> import torch, thinwire as tw
        >>> codec = tw.codec.DenseLast(tw.QSGD(bits=4, bucket_size=512))
        >>> codec.nbytes(1000)  # a scale and 512 codes of half a byte; 488 elements as they are
        2212
        >>> x = torch.linspace(-1, 1, 1000)
        >>> torch.equal(codec.decode(codec.encode(x), 1000)[512:], x[512:])
        True
    """

    def __post_init__(self) -> None:
        require_kind("DenseLast: codec", self.codec, Codec, "a codec such as QSGD(bits=4)")
        require(
            self.codec.traits.bucket_size is not None,
            f"DenseLast: {self.codec} has no buckets that each worker encodes alone; use one such as QSGD(bits=4)",
        )
        super().__post_init__()

    @cached_property
    def traits(self) -> Traits:
        inner = self.codec.traits
        return inner.through(self.codec, "DenseLast", ("shared_key", "adaptive"), unbiased=inner.unbiased)

    def reaching(self, segments: Sequence[Tensor], keys: Sequence[Key]) -> Sequence[Tensor]:
        return self.codec.reaching([s.reshape(-1)[: self._whole(s.numel())] for s in segments], keys)

    def encode_segments(self, segments: list[Tensor], keys: list[int], residuals: list[Tensor] | None) -> Tensor:
        bodies, tails = self._cut(segments)
        kept = None if residuals is None else self._cut(residuals)[0]
        tail = torch.cat(tails).view(torch.uint8)  # before the residuals, which may be the segments
        payload = torch.cat([self.codec.encode_segments(bodies, keys, kept), tail])
        for r in [] if residuals is None else self._cut(residuals)[1]:
            r.zero_()  # float32 elements lose nothing
        return payload

    def decode_add_segments(self, payload: Tensor, outs: list[Tensor], weight: float, keys: list[int]) -> None:
        bodies, tails = self._cut(outs)
        size = self.codec.segments_nbytes([body.numel() for body in bodies])
        self.codec.decode_add_segments(payload[:size], bodies, weight, keys)
        # The tail may start at any address, so this may copy.
        kernels.mix.add(tails, kernels.payload_as(payload[size:], torch.float32), own_weight=weight)

    def segments_nbytes(self, sizes: list[int]) -> int:
        whole = [self._whole(n) for n in sizes]
        return self.codec.segments_nbytes(whole) + 4 * (sum(sizes) - sum(whole))

    def section_nbytes(self, size: int) -> tuple[int, ...] | None:
        whole = self._whole(size)
        inner = self.codec.section_nbytes(whole)
        return None if inner is None else (*inner, 4 * (size - whole))

    def _cut(self, tensors: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Complete buckets, and what is left, of each tensor."""
        whole = [self._whole(t.numel()) for t in tensors]
        pairs = list(zip(tensors, whole, strict=True))
        return [t[:n] for t, n in pairs], [t[n:] for t, n in pairs]

    def _whole(self, numel: int) -> int:
        """Elements of a segment in complete buckets."""
        assert self.codec.traits.bucket_size is not None, "the constructor has checked that there are buckets"
        return numel - numel % self.codec.traits.bucket_size
