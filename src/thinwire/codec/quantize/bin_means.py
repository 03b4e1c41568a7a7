"""Few bits an element: each bucket is split into bins at means, and every element becomes the mean of its bin."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from ... import kernels
from ...options import require_integer
from ..base import Codec
from ..traits import Traits


@dataclass(frozen=True, repr=False)
class BinMeans(Codec):
    """Sends each element as one of `2^bits` bins, and the mean of each bin.

    The first bit splits a bucket at zero; each further bit splits every bin at its mean:

        C(x_i) = mean of {x_j : x_j in the bin of x_i}

    With 2 bits the bins are the large and the small positive elements, and the large and the small negative ones. With 1 bit
    it has the values of `OneBit`. The payload has `bits` bits an element and `4 2^bits` bytes a bucket.

    Biased: use it with a memory such as `ErrorFeedback`. Check: the mean of a bucket is kept,
    `|x - C(x)|^2 = |x|^2 - |C(x)|^2`, and more bits lose no more.

    Args:
        bits: bits an element, 1 to 8; lower => smaller messages, more error.
        bucket_size: elements that share the bins; larger => fewer means. None for the whole segment.

    Raises:
        ValueError: a field out of range.

    Source: ours, for the 2 bits of SparseLoCo (Sarfi et al. 2025, arXiv 2508.15706), whose released code takes its four values
    from the mean and the deviation instead; Seide et al. 2014 for 1 bit.

    Example:
        >>> import torch, thinwire as tw
        >>> codec = tw.codec.BinMeans(bits=2)
        >>> codec.decode(codec.encode(torch.tensor([1.0, 2.0, 9.0, -4.0, -4.0])), 5)
        tensor([ 1.5000,  1.5000,  9.0000, -4.0000, -4.0000])
    """

    bits: int = 2
    bucket_size: int | None = 4096

    def __post_init__(self) -> None:
        require_integer("BinMeans: bits", self.bits, 1, 8)
        require_integer("BinMeans: bucket_size", self.bucket_size, 1, or_none=True)

    @cached_property
    def traits(self) -> Traits:
        return Traits(bucket_size=self.bucket_size)

    def encode_segments(self, segments: list[Tensor], keys: list[int], residuals: list[Tensor] | None) -> Tensor:
        payload = self._empty_payload(segments)
        kernels.bin_means.encode(segments, payload, self.bits, self.bucket_size, residuals)
        return payload

    def decode_add_segments(self, payload: Tensor, outs: list[Tensor], weight: float, keys: list[int]) -> None:
        kernels.bin_means.decode_add(payload, outs, weight, self.bits, self.bucket_size)

    def segments_nbytes(self, numels: list[int]) -> int:
        return kernels.bin_means.nbytes(numels, self.bits, self.bucket_size)

    def section_nbytes(self, size: int) -> tuple[int, ...]:
        return self._head_and_rest((4 << self.bits) * kernels.num_buckets([size], self.bucket_size), size)
