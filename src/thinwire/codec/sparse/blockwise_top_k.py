"""Block-wise top-k: each block of a tensor sends its largest elements."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from torch import Tensor

from ... import debug, kernels
from ...options import require_integer
from ...schedule import Schedule
from ...streams import uploaded
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
        require_integer("BlockwiseTopK: block", self.block, 1, _MAX_BLOCK)

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

    def _runs(self, counts: list[int], numels: list[int]) -> list[_Run]:
        return _runs((self.block - 1).bit_length(), tuple(counts), tuple(numels))

    def pack_indices(self, indices: Tensor, counts: list[int], numels: list[int]) -> Tensor:
        runs = self._runs(counts, numels)
        codes = [debug.empty(run.nbytes, dtype=torch.uint8, device=indices.device) for run in runs]
        for run, index, code in zip(runs, indices.split([sum(run.counts) for run in runs]), codes, strict=True):
            if run.word_bits:
                # The position in its block is enough: every block keeps a known number.
                kernels.words.encode(index % self.block, run.counts, run.word_bits, code)
            else:
                kernels.indices.encode(index, run.counts, run.numels, code)
        return codes[0] if len(codes) == 1 else torch.cat(codes)

    def unpack_indices(self, payload: Tensor, counts: list[int], numels: list[int]) -> tuple[Tensor, int]:
        runs = self._runs(counts, numels)
        nbytes = sum(run.nbytes for run in runs)
        codes = tail(payload, nbytes).split([run.nbytes for run in runs])
        indices = [
            self._unpack_words(run, code) if run.word_bits else kernels.indices.decode(code, run.counts, run.numels)
            for run, code in zip(runs, codes, strict=True)
        ]
        return torch.cat(indices), nbytes

    def _unpack_words(self, run: _Run, code: Tensor) -> Tensor:
        numels, ends = run.numels, list(accumulate(run.counts))
        rows = uploaded(code.device, [ends, [0, *ends[:-1]], [0, *accumulate(numels[:-1])], numels])
        place = torch.arange(ends[-1], device=code.device)
        first, base, numel = rows[1:, torch.searchsorted(rows[0], place, right=True)].unbind()
        blocks = (place - first) // num_kept(self.ratio, self.block)  # a shorter last block may keep fewer
        indices = kernels.words.decode(code, run.counts, run.word_bits) + blocks * self.block
        positions = base + indices  # segments end to end
        kernels.flags.demand(
            (indices < numel).all() & (positions[1:] > positions[:-1]).all(),
            kernels.flags.Fault.CORRUPT_INDICES,
            f"{self}: the payload is corrupt, its indices do not ascend inside segments of {numels} elements",
        )
        return indices.int()

    def indices_nbytes(self, counts: list[int], numels: list[int]) -> int:
        return sum(run.nbytes for run in self._runs(counts, numels))


class _Run(NamedTuple):
    """Segments that lie next to each other and whose indices are coded alike.

    Attributes:
        word_bits: of the words that hold positions in blocks; 0 for the code of `kernels.indices`, where that is smaller.
        nbytes: of the codes.
        counts: indices of each segment.
        numels: elements of each segment.
    """

    word_bits: int
    nbytes: int
    counts: list[int]
    numels: list[int]


@lru_cache(maxsize=256)
def _runs(word_bits: int, counts: tuple[int, ...], numels: tuple[int, ...]) -> list[_Run]:
    sizes = [
        (kernels.words.nbytes(k, word_bits), kernels.indices.nbytes(k, n), k, n)
        for k, n in zip(counts, numels, strict=True)
    ]
    runs = []
    for in_words, run in groupby(sizes, lambda size: size[0] < size[1]):
        words, others, ks, ns = map(list, zip(*run, strict=True))
        runs.append(_Run(word_bits if in_words else 0, sum(words if in_words else others), ks, ns))
    return runs
