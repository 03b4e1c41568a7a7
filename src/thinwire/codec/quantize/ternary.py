"""Ternary quantization: three values per element."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ... import kernels
from ...kernels import Flag
from ...options import require_integer, require_number
from ..agreed_codec import AgreedCodec
from ..base import Codec
from ..traits import Traits
from ..types import Symbols


@dataclass(frozen=True, repr=False)
class TernGrad(AgreedCodec):
    """Stochastic rounding to -1, 0 or 1 times a scale: 1.6 bits an element (five a byte) and a float32 per scale.

        C(x) = scale * sign(x) * b,   P(b = 1) = min(1, |x| / scale),   scale = min(max |x|, clip * sigma)

    sigma is the standard deviation of the segment; a segment whose elements are all equal is not clipped. Elements that
    are not clipped are unbiased. Check: `E(C(x)-x)^2 = |x| (scale - |x|)` where `|x| <= scale`.

    With `shared` the workers first agree on the largest of their scales, and then add their payloads on the wire. Each
    element is a digit in base `2 W + 1`, large enough for the sum of W workers. An int32 holds as many digits as keep it
    below 2^31. An element takes 3.6 bits for 4 workers, 4.6 for 8 and 5.3 for 16. An all-reduce sends them `2(W-1)/W`
    times, while an all-gather without `shared` sends 1.6 bits `W-1` times. So `shared` saves bytes from about 5 workers
    on. Outside of an averager, the payload is the same with and without `shared`.

    Args:
        clip: how many standard deviations are kept; lower => less noise, more bias. None clips nothing.
        bucket_size: elements that share a scale; None for the whole segment, as in the paper.
        shared: whether workers agree on scales, so that payloads are summable.

    Raises:
        ValueError: a field out of range.

    Source: Wen et al. 2017, TernGrad, arXiv 1705.07878.

    Example:
        >>> import torch, thinwire as tw
        >>> codec = tw.TernGrad()
        >>> codec.nbytes(1000)  # a scale, and 1000 ternary digits
        204
        >>> codec.decode(codec.encode(torch.tensor([2.0, 0.0, -2.0])), 3)
        tensor([ 2.,  0., -2.])
    """

    clip: float | None = 2.5
    bucket_size: int | None = None
    shared: bool = False

    def __post_init__(self) -> None:
        require_number("TernGrad: clip", self.clip, above=0, or_none=True)
        require_integer("TernGrad: bucket_size", self.bucket_size, 1, or_none=True)

    combined_by = "max"  # the common scale then clips no worker's elements more than its own would

    @cached_property
    def traits(self) -> Traits:
        agreement = self if self.shared else None
        return Traits(unbiased=self.clip is None, bucket_size=self.bucket_size, agreement=agreement)

    @cached_property
    def _packing(self) -> kernels.ternary.Ternary:
        return kernels.ternary.Ternary(3, self.bucket_size)

    def propose(self, segments: list[Tensor]) -> Tensor:
        """The scales that this worker would use."""
        return kernels.ternary.scales(segments, math.inf if self.clip is None else self.clip, self.bucket_size)

    def agreed(self, total: Tensor, num_workers: int) -> Codec:
        return SharedTernary(total, num_workers, self.bucket_size)

    def symbols(self, numels: list[int]) -> Symbols:
        """Bytes of five digits."""
        return Symbols(8, [self._packing.nbytes([n]) for n in numels])

    def encode_segments(self, segments: list[Tensor], keys: list[int], residuals: list[Tensor] | None) -> Tensor:
        payload, scales = self._empty_payload(segments), self.propose(segments)
        split = 4 * scales.numel()
        payload[:split] = scales.view(torch.uint8)
        kernels.ternary.encode(segments, scales, payload[split:], keys, self._packing, residuals)
        return payload

    def decode_add_segments(self, payload: Tensor, outs: list[Tensor], weight: float, keys: list[int]) -> None:
        scales, digits = self._parts_of(payload, outs)
        kernels.ternary.decode_add(digits, scales, outs, weight, self._packing)

    def decode_sum_segments(self, payloads: list[Tensor], outs: list[Tensor], weight: float, keys: list[int]) -> Flag:
        scales, digits = zip(*(self._parts_of(payload, outs) for payload in payloads), strict=True)
        return kernels.ternary.decode_sum(digits, scales, outs, weight, self._packing)

    def _parts_of(self, payload: Tensor, outs: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The scales and the digits of a payload."""
        split = 4 * kernels.num_buckets([o.numel() for o in outs], self.bucket_size)
        return kernels.payload_as(payload[:split], torch.float32), payload[split:]

    def segments_nbytes(self, numels: list[int]) -> int:
        return 4 * kernels.num_buckets(numels, self.bucket_size) + self._packing.nbytes(numels)

    def section_nbytes(self, size: int) -> tuple[int, ...]:
        return 4 * kernels.num_buckets([size], self.bucket_size), self._packing.nbytes([size])


# eq=False: `==` of tensors is no single truth value.
@dataclass(frozen=True, eq=False)
class SharedTernary(Codec):
    """`TernGrad(shared=True)` in one step: all workers know the scales, so payloads may be added.

    Args:
        scales: float32, one for each bucket.
        num_workers: W, how many payloads are added; the digits are in base `2 W + 1`.
        bucket_size: elements that share a scale; None for the whole segment.
    """

    scales: Tensor
    num_workers: int
    bucket_size: int | None

    @cached_property
    def traits(self) -> Traits:
        return Traits(sum_dtype=torch.uint8 if self.num_workers == 1 else torch.int32)  # one worker's digits fill bytes

    @property
    def base(self) -> int:
        """Base of the digits. A digit is a value plus 1, so W of them add up to 2 W at most."""
        return 2 * self.num_workers + 1

    @cached_property
    def _packing(self) -> kernels.ternary.Ternary:
        return kernels.ternary.Ternary(self.base, self.bucket_size)

    def encode_segments(self, segments: list[Tensor], keys: list[int], residuals: list[Tensor] | None) -> Tensor:
        payload = self._empty_payload(segments)
        kernels.ternary.encode(segments, self.scales, payload, keys, self._packing, residuals)
        return payload

    def decode_add_segments(self, payload: Tensor, outs: list[Tensor], weight: float, keys: list[int]) -> None:
        kernels.ternary.decode_add(payload, self.scales, outs, weight, self._packing)

    def decode_sum_segments(self, payloads: list[Tensor], outs: list[Tensor], weight: float, keys: list[int]) -> Flag:
        return kernels.ternary.decode_sum(payloads, [self.scales] * len(payloads), outs, weight, self._packing)

    def segments_nbytes(self, numels: list[int]) -> int:
        return self._packing.nbytes(numels)
