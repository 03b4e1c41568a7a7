"""Few bits an element: each bucket is split into bins at means, and every element becomes the mean of its bin."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ... import debug, kernels
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
        made = []
        for i, x in enumerate(segments):
            bins, means = self._split(x)
            words = debug.empty(kernels.words.nbytes(x.numel(), self.bits), dtype=torch.uint8, device=x.device)
            # Bins are numbered over all buckets; a code names one inside its bucket.
            kernels.words.encode((bins % (1 << self.bits)).to(torch.int32), [bins.numel()], self.bits, words)
            made.append((means, words))
            if residuals is not None:
                torch.sub(x, means[bins], out=residuals[i])
        return torch.cat([*(means.view(torch.uint8) for means, _ in made), *(words for _, words in made)])

    def decode_add_segments(self, payload: Tensor, outs: list[Tensor], weight: float, keys: list[int]) -> None:
        counts = [self._num_means(out.numel()) for out in outs]
        num_words = [kernels.words.nbytes(out.numel(), self.bits) for out in outs]
        head, words = payload.split([4 * sum(counts), sum(num_words)])
        all_means = kernels.payload_as(head, torch.float32).split(counts)
        for out, means, part in zip(outs, all_means, words.split(num_words), strict=True):
            codes = kernels.words.decode(part, [out.numel()], self.bits).long()
            out.add_(means[codes + self._first_bins(out)], alpha=weight)

    def segments_nbytes(self, numels: list[int]) -> int:
        return sum(map(sum, map(self.section_nbytes, numels)))

    def section_nbytes(self, size: int) -> tuple[int, ...]:
        return 4 * self._num_means(size), kernels.words.nbytes(size, self.bits)

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The bin of each element, counted over all buckets, and the float32 mean of every bin."""
        bucket = self._first_bins(x) >> self.bits
        bins, thresholds = bucket, x.new_zeros(self._num_buckets(x.numel()))
        for bit in range(self.bits):
            bins = 2 * bins + (x >= thresholds[bins])  # NaN goes to the lower bin, and makes its mean NaN
            thresholds = _means(x, bins, self._num_buckets(x.numel()) << (bit + 1))
        return bins, thresholds

    def _num_buckets(self, numel: int) -> int:
        return -(-numel // (self.bucket_size or max(1, numel)))

    def _num_means(self, numel: int) -> int:
        return self._num_buckets(numel) << self.bits

    def _first_bins(self, x: Tensor) -> Tensor:
        """For each element, the number of the first bin of its bucket."""
        place = torch.arange(x.numel(), device=x.device)
        return (place // (self.bucket_size or max(1, x.numel()))) << self.bits


def _means(x: Tensor, bins: Tensor, num_bins: int) -> Tensor:
    """The float32 mean of each bin, from sums in float64; 0 for an empty one."""
    sums = torch.zeros(num_bins, dtype=torch.float64, device=x.device).index_add_(0, bins, x.double())
    counts = torch.bincount(bins, minlength=num_bins)
    means: Tensor = (sums / counts.clamp(min=1)).float()
    return means
