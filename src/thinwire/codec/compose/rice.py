"""Entropy coding of the gaps between kept coordinates: frequent gaps take fewer bits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from ... import kernels
from ...algorithm import Algorithm, require
from ..sparse.base import Sparsifier
from ..sparse.payload import with_length, without_length
from ..traits import Traits
from ..types import Selection


@dataclass(frozen=True, repr=False)
class Rice(Algorithm):
    """The last link of a `chain` that begins with a sparsifier: a Rice code of the gaps between indices.

    The gaps are `g_j = index_j - index_(j-1) - 1`. The width l is about `log2(n / k)` and follows from k, the number of
    indices, and n, the size of the segment. A gap is coded as `g_j >> l` in unary, then its low l bits. Coordinates that
    are kept independently of each other have geometric gaps. These cost up to 0.1 bits an index more than their entropy;
    Elias-Fano, the default, costs 0.5 more. The code is never longer than Elias-Fano or a bitmap. The size of the
    payload depends on the data; 4 bytes at its end say how many bytes the codes take.

    Source: Golomb 1966, Run-length encodings; Rice and Plaunt 1971, Adaptive variable-length coding.

    Example:
        >>> import math, torch, thinwire as tw
        >>> n, k = 1_000_000, 10_000
        >>> x = torch.randn(n, generator=torch.Generator().manual_seed(0))
        >>> plain, coded = tw.TopK(0.01), tw.chain(tw.TopK(0.01), tw.codec.Rice())
        >>> entropy = (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2) / k
        >>> [round(8 * (codec.encode(x).numel() - 4 * k) / k, 2) for codec in (plain, coded)], round(entropy, 2)
        ([8.56, 8.11], 8.08)
        >>> torch.equal(coded.decode(coded.encode(x), n), plain.decode(plain.encode(x), n))
        True
    """


@dataclass(frozen=True, repr=False)
class GapCoded(Sparsifier):
    """The result of `chain(sparsifier, Rice())`: selects as `sparsifier` does, and codes the indices with Rice."""

    sparsifier: Sparsifier

    def __post_init__(self) -> None:
        require(
            self.sparsifier.codes_plainly,
            f"chain: Rice codes the indices of TopK, Threshold or AdaptiveThreshold, not those of {self.sparsifier}",
        )
        _ = self.traits  # refuses what it does not carry

    @cached_property
    def traits(self) -> Traits:
        inner = self.sparsifier.traits
        sparse = None if inner.sparse is None else inner.sparse._replace(coding=self)
        return inner.through(
            self.sparsifier, "Rice", unbiased=inner.unbiased, lossless=inner.lossless, fixed_size=False, sparse=sparse
        )

    def _links(self) -> tuple[Algorithm, ...]:
        return self.sparsifier, Rice()

    @property
    def counts_travel(self) -> bool:
        return self.sparsifier.counts_travel

    def gains(self, numels: list[int]) -> list[float] | None:
        return self.sparsifier.gains(numels)

    def count(self, numel: int) -> int:
        return self.sparsifier.count(numel)

    def select(self, segments: list[Tensor], keys: list[int]) -> Selection:
        return self.sparsifier.select(segments, keys)

    def pack_indices(self, indices: Tensor, counts: list[int], numels: list[int]) -> Tensor:
        return with_length(kernels.rice.encode(indices, counts, numels))

    def unpack_indices(self, payload: Tensor, counts: list[int], numels: list[int]) -> tuple[Tensor, int]:
        codes, nbytes = without_length(self, payload)
        return kernels.rice.decode(codes, counts, numels), nbytes

    def indices_nbytes(self, counts: list[int], numels: list[int]) -> int:
        # 4 for the length that `with_length` appends.
        return 4 + sum(kernels.rice.max_nbytes(k, n) for k, n in zip(counts, numels, strict=True))
