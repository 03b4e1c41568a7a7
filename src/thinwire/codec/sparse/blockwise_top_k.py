"""Block-wise top-k: each block of a tensor sends its largest elements."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ... import debug, kernels
from ...algorithm import require
from ...schedule import Schedule
from ..dense.cast import Identity
from ..traits import Traits
from ..types import Selection
from .base import Sparsifier, check_ratio
from .payload import SparseParts, tail
from .top_k import TopK, num_kept

_MAX_BLOCK = 4096  # so that a position in a block fits 12 bits


@dataclass(frozen=True, repr=False)
class BlockwiseTopK(Sparsifier):
    """Keeps the `max(1, ceil(ratio * c))` largest magnitudes of each block of c consecutive elements of a segment.

    Every block of a tensor sends something. An index counts from the start of its block, so it takes at most 12 bits.
    If a block keeps 4 elements of 4096 or more, the Elias-Fano code of the whole segment is smaller and is used
    instead. The size is fixed. A shorter last block of c elements keeps `ceil(ratio * c)` of them.

    Biased: use it with a memory such as `ErrorFeedback`. Check: `|x - C(x)|^2 <= (1 - ratio) |x|^2`, as for `TopK`.

    Args:
        ratio: fraction of the coordinates that is kept, in (0, 1]; lower => smaller messages.
        block: elements of a block, 1 to 4096; larger => closer to `TopK`.

    Raises:
        ValueError: a field out of range.

    Source: SparseLoCo, arXiv 2508.15706 (64 of each 4096).

    Example:
        >>> import torch, thinwire as tw
        >>> codec = tw.codec.BlockwiseTopK(ratio=0.5, block=2)
        >>> codec.decode(codec.encode(torch.tensor([9.0, 8.0, 0.1, 0.2])), 4)
        tensor([9.0000, 0.0000, 0.0000, 0.2000])
    """

    ratio: float | Schedule
    block: int = _MAX_BLOCK

    def __post_init__(self) -> None:
        check_ratio(self, self.ratio)
        require(
            isinstance(self.block, int) and 1 <= self.block <= _MAX_BLOCK,
            f"BlockwiseTopK: block must be an integer from 1 to {_MAX_BLOCK}, got {self.block!r}",
        )

    def count(self, numel: int) -> int:
        return numel // self.block * num_kept(self.ratio, self.block) + num_kept(self.ratio, numel % self.block)

    def in_blocks(self, size: int) -> BlockwiseTopK:
        """Keeps as many of each block of `size` elements as now of each of its blocks, or all."""
        return replace(self, ratio=min(1.0, num_kept(self.ratio, self.block) / size), block=size)

    @cached_property
    def traits(self) -> Traits:
        # What meets in a region is no longer sorted into blocks, so its indices are coded as those of `TopK`.
        return Traits(sparse=SparseParts(self, TopK(self.ratio), Identity()))

    def select(self, segments: list[Tensor], keys: list[int]) -> Selection:
        last_counts = [num_kept(self.ratio, s.numel() % self.block) for s in segments]
        selected = kernels.select.topk_in_chunks(segments, self.block, num_kept(self.ratio, self.block), last_counts)
        return Selection(*selected, [self.count(s.numel()) for s in segments])

    @property
    def _word_bits(self) -> int:
        return (self.block - 1).bit_length()

    def _in_words(self, count: int, numel: int) -> bool:
        """Whether positions inside blocks, coded in words of equal width, are smaller than Elias-Fano."""
        return kernels.words.nbytes(count, self._word_bits) < kernels.indices.nbytes(count, numel)

    def pack_indices(self, indices: Tensor, counts: list[int], numels: list[int]) -> Tensor:
        codes = debug.empty(self.indices_nbytes(counts, numels), dtype=torch.uint8, device=indices.device)
        code_parts = codes.split([self.indices_nbytes([k], [n]) for k, n in zip(counts, numels, strict=True)])
        for index, code, numel in zip(indices.split(counts), code_parts, numels, strict=True):
            if self._in_words(index.numel(), numel):
                kernels.words.encode(index % self.block, self._word_bits, code)
            else:
                kernels.indices.encode(index, [index.numel()], [numel], code)
        return codes

    def unpack_indices(self, payload: Tensor, counts: list[int], numels: list[int]) -> tuple[Tensor, int]:
        nbytes = self.indices_nbytes(counts, numels)
        code_parts = tail(payload, nbytes).split(
            [self.indices_nbytes([k], [n]) for k, n in zip(counts, numels, strict=True)]
        )
        indices = [
            self._unpack_words(code, k, n) if self._in_words(k, n) else kernels.indices.decode(code, [k], [n])
            for code, k, n in zip(code_parts, counts, numels, strict=True)
        ]
        return torch.cat(indices), nbytes

    def _unpack_words(self, code: Tensor, count: int, numel: int) -> Tensor:
        blocks = torch.arange(count, dtype=torch.int32, device=code.device) // num_kept(self.ratio, self.block)
        # A shorter last block may keep fewer.
        indices = kernels.words.decode(code, count, self._word_bits) + blocks * self.block
        kernels.flags.demand(
            (indices < numel).all() & (indices[1:] > indices[:-1]).all(),
            kernels.flags.Fault.CORRUPT_INDICES,
            f"{self}: the payload is corrupt, its indices do not ascend inside {numel} elements",
        )
        return indices

    def indices_nbytes(self, counts: list[int], numels: list[int]) -> int:
        return sum(
            min(kernels.words.nbytes(k, self._word_bits), kernels.indices.nbytes(k, n))
            for k, n in zip(counts, numels, strict=True)
        )
