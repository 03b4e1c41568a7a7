"""Statistics of a gradient for adaptive levels: the norm of each bucket, and mean and deviation of x / norm.

Statistics are vectors of fixed length, so that workers can pool them by all-gather: send `to_tensor()`, rebuild each
worker's with `from_tensor`, and `concatenate` them in rank order. Equal statistics give equal levels on all workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .distributions import TruncatedNormalMixture

CHUNK = 2**16  # elements


class BucketStatistics(NamedTuple):
    """Statistics of buckets, one entry each, float64 `[num_buckets]`.

    Attributes:
        norms: the bucket's norm; 0 if all its elements are zero or one is not finite.
        means: mean of the coordinates divided by the norm, in [-1, 1].
        stds: their (population) standard deviation.
        counts: the number of coordinates; the last bucket of a tensor may have fewer than the others.
    """

    norms: Tensor
    means: Tensor
    stds: Tensor
    counts: Tensor

    @property
    def informative(self) -> bool:
        """Whether any bucket has a norm above zero, so that levels can adapt to it."""
        return bool((self.norms > 0).any())

    def to_tensor(self) -> Tensor:
        """All four fields in one float64 vector of `4 * num_buckets`, for an all-gather."""
        return torch.cat(self)

    @staticmethod
    def from_tensor(flat: Tensor) -> BucketStatistics:
        """The inverse of `to_tensor`."""
        return BucketStatistics(*flat.to(torch.float64).view(4, flat.numel() // 4))

    @staticmethod
    def concatenate(parts: Sequence[BucketStatistics]) -> BucketStatistics:
        """The buckets of several tensors, or of several workers in rank order."""
        return BucketStatistics(*map(torch.cat, zip(*parts, strict=True)))

    def largest(self, num_buckets: int) -> BucketStatistics:
        """The `num_buckets` buckets of largest norm, in descending order, padded with zeros; ties go to the first bucket."""
        kept = torch.sort(self.norms, descending=True, stable=True).indices[:num_buckets]
        padding = (0, num_buckets - kept.numel())
        return BucketStatistics(*(torch.nn.functional.pad(field[kept], padding) for field in self))

    def merged(self) -> BucketStatistics:
        """All buckets of non-zero norm as one entry: the moments of all their coordinates, and the largest norm."""
        if not self.informative:
            return BucketStatistics(*[torch.zeros(1, dtype=torch.float64, device="cpu")] * 4)
        counts = torch.where(self.norms > 0, self.counts, 0)
        mean = (counts * self.means).sum() / counts.sum()
        variance = (counts * (self.stds**2 + (self.means - mean) ** 2)).sum() / counts.sum()
        return BucketStatistics(*(f.reshape(1) for f in (self.norms.max(), mean, variance.sqrt(), counts.sum())))


def bucket_statistics(x: Tensor, bucket_size: int, norm: str = "l2") -> BucketStatistics:
    """Norm, mean and standard deviation of every bucket of `bucket_size` consecutive coordinates of x.

    With `r = x / norm` over a bucket of d coordinates: `mean = sum r / d`, `std^2 = sum (r-mean)^2 / d`. Computed in
    float64 on the device of x and returned on the CPU.

    Args:
        x: `[n]` (any shape is flattened), any floating dtype.
        bucket_size: coordinates a bucket; that of the codec.
        norm: "l2" or "max", that of the codec.

    Example:
        >>> stats = bucket_statistics(torch.tensor([3.0, -4.0, 0.0, 0.0, 2.0]), bucket_size=2)
        >>> stats.norms.tolist(), stats.counts.tolist()
        ([5.0, 0.0, 2.0], [2.0, 2.0, 1.0])

    Source: arXiv 2010.12460.
    """
    flat = x.detach().reshape(-1).to(torch.float64)
    padding = -flat.numel() % bucket_size
    buckets = torch.nn.functional.pad(flat, (0, padding)).reshape(-1, bucket_size)
    counts = torch.full_like(buckets[:, 0], bucket_size)
    counts[-1:] -= padding  # a slice, because an empty tensor has no bucket
    norms = buckets.norm(dim=1) if norm == "l2" else buckets.abs().amax(dim=1)
    norms = torch.where(torch.isfinite(norms), norms, 0)
    scaled = torch.where(norms[:, None] > 0, buckets / norms[:, None], 0)
    means = scaled.sum(dim=1) / counts
    present = torch.arange(bucket_size, device=flat.device) < counts[:, None]
    variances = torch.where(present, (scaled - means[:, None]) ** 2, 0).sum(dim=1) / counts
    return BucketStatistics(*(field.cpu() for field in (norms, means, variances.sqrt(), counts)))


def sample_buckets(x: Tensor, bucket_size: int, norm: str, num_buckets: int, largest: bool) -> BucketStatistics:
    """`bucket_statistics` of some buckets: at most `num_buckets` whole ones, and the shorter last one.

    Args:
        x, bucket_size, norm: as for `bucket_statistics`.
        num_buckets: higher => slower.
        largest: whether to take the buckets of largest norm, else evenly spaced ones.

    Example:
        >>> sample_buckets(torch.tensor([1.0, 0.0, 3.0, -4.0, 2.0]), 2, "l2", num_buckets=1, largest=True).norms.tolist()
        [5.0, 2.0]
    """
    flat = x.detach().reshape(-1)
    whole = flat.numel() // bucket_size
    rows, tail = flat[: whole * bucket_size].view(whole, bucket_size), flat[whole * bucket_size :]
    if whole > num_buckets:
        evenly = torch.arange(num_buckets, device=rows.device) * whole // num_buckets
        rows = rows[_rank(rows, norm)[:num_buckets] if largest else evenly]
    chunks = [*rows.split(max(1, CHUNK // bucket_size)), tail]  # whose float64 copies stay in the cache
    return BucketStatistics.concatenate([bucket_statistics(chunk, bucket_size, norm) for chunk in chunks])


def _rank(rows: Tensor, norm: str) -> Tensor:
    """Indices of rows by falling norm, those that are not finite last; in the precision of the rows, for speed."""
    norms = torch.linalg.vector_norm(rows, 2 if norm == "l2" else torch.inf, dim=1)
    return torch.sort(torch.where(torch.isfinite(norms), norms, -1), descending=True, stable=True).indices


def mixture(stats: BucketStatistics, num_buckets: int, weighting: str = "norm") -> TruncatedNormalMixture:
    """One truncated normal for each of the `num_buckets` buckets of largest norm.

    `f = sum_k w_k N(mean_k, std_k^2)`, each cut off to [-1, 1], `w_k` proportional to the norm, or to its square, and
    to the number d_k of coordinates (equal but for last buckets): as a bucket's error is `norm_k^2 d_k Psi_k`, the
    square makes Psi the error of the gradient itself.

    Args:
        stats: of one worker, or of several; `informative`.
        num_buckets: at most so many components (20 to 350). Higher => slower update, closer to the gradient.
        weighting: "norm" or "norm2".

    Example:
        >>> stats = bucket_statistics(torch.tensor([3.0, -4.0, 0.0, 0.0, 12.0, 5.0]), bucket_size=2)
        >>> [round(w, 4) for w in mixture(stats, 2).weights.tolist()]
        [0.7222, 0.2778]

    Source: arXiv 2010.12460.
    """
    kept = stats.largest(num_buckets)
    # Relative to the largest norm, so that squares cannot overflow.
    weights = kept.norms / kept.norms.max()
    weights = (weights**2 if weighting == "norm2" else weights) * kept.counts
    return TruncatedNormalMixture(weights, kept.means, kept.stds)


def pooled(stats: BucketStatistics) -> TruncatedNormalMixture:
    """One truncated normal with the moments of all normalised coordinates together (ALQ-N, AMQ-N).

    `mean = sum_k d_k mean_k / d`, `std^2 = sum_k d_k (std_k^2 + mean_k^2) / d - mean^2`, over the buckets of non-zero
    norm with `d_k` coordinates, d in all. The statistics must be `informative`.

    Example:
        >>> dist = pooled(bucket_statistics(torch.tensor([3.0, -4.0, 0.0, 0.0, 4.0, -3.0]), bucket_size=2))
        >>> round(dist.means.item(), 6), round(dist.stds.item(), 6)
        (0.0, 0.707107)

    Source: arXiv 2010.12460.
    """
    every = stats.merged()
    return TruncatedNormalMixture(torch.ones_like(every.means), every.means, every.stds)


def prior(bucket_size: int, norm: str) -> TruncatedNormalMixture:
    """The distribution assumed before the first observation: coordinates of a bucket of independent normal numbers.

    The L2 norm of d numbers is about `sqrt(d)` standard deviations. Their largest magnitude is about the quantile of
    `1 - 1 / (2 (d + 1))`.

    Example:
        >>> round(prior(400, "l2").stds.item(), 3), round(prior(400, "max").stds.item(), 3)
        (0.05, 0.331)
    """
    one = torch.ones(1, dtype=torch.float64, device="cpu")
    std = one * bucket_size**-0.5 if norm == "l2" else 1 / torch.special.ndtri(one - 0.5 / (bucket_size + 1))
    return TruncatedNormalMixture(one, torch.zeros_like(one), std)
