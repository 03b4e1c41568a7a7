"""The regions of a sparse all-reduce: which worker owns, adds and selects which coordinates.

Segment s has n_s coordinates, and k_s of them are kept; K is the sum of all k_s. The coordinates of each segment are
shuffled by a fixed map, and all segments are laid end to end:

    position of coordinate i of segment s    base_s + (a_s i mod n_s),    a_s near the golden section of n_s, coprime to it

So hot rows, columns or blocks of a tensor are spread evenly over its positions. Worker r owns one run of positions. It
begins where r K // W coordinates are to be kept before it, if each segment keeps its k_s evenly spread. Regions differ
by one kept coordinate at most, whatever the sizes of the segments. A region is a list of pieces, one for each segment
that it overlaps; there are at most W - 1 more pieces than segments.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from functools import cached_property, lru_cache
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from ....streams import uploaded


class Piece(NamedTuple):
    """The part of one segment that lies in one region.

    Attributes:
        segment: its number.
        start: its first position.
        numel: how many positions it has.
        kept: how many coordinates its owner keeps.
    """

    segment: int
    start: int
    numel: int
    kept: int


class Regions:
    """Where the coordinates of some segments lie, and who owns them. See the module's text.

    Args:
        numels: elements of each segment, n_s.
        kept: coordinates that are kept of each segment, k_s.
        size: number of workers, W.

    Example:
        >>> Regions((10, 100), (2, 10), size=3).pieces[0]
        [Piece(segment=0, start=0, numel=10, kept=2), Piece(segment=1, start=10, numel=20, kept=2)]
    """

    def __init__(self, numels: tuple[int, ...], kept: tuple[int, ...], size: int):
        self.numels, self.kept, self.size = numels, kept, size
        self.bases = [0, *accumulate(numels)]
        self.multipliers = [spread(n) for n in numels]
        ends = [0, *accumulate(kept)]
        bounds = [rank * ends[-1] // size for rank in range(size + 1)]
        self.pieces = [self._region(ends, *pair) for pair in zip(bounds[:-1], bounds[1:], strict=True)]

    def _region(self, ends: list[int], first: int, last: int) -> list[Piece]:
        """The pieces between two numbers of kept coordinates."""
        pieces = []
        # From the segment in which coordinate `first` lies.
        for s in range(bisect_right(ends, first) - 1, len(self.numels)):
            begin, end = max(first, ends[s]), min(last, ends[s + 1])
            if begin < end:
                start, stop = (self.bases[s] + (at - ends[s]) * self.numels[s] // self.kept[s] for at in (begin, end))
                pieces.append(Piece(s, start, stop - start, end - begin))
        return pieces

    @cached_property
    def starts(self) -> list[int]:
        """The first position of each piece, ascending, and the number of all positions."""
        return [piece.start for region in self.pieces for piece in region] + [self.bases[-1]]

    def positions(self, indices: Tensor, counts: list[int]) -> Tensor:
        """The int64 positions of int32 `indices`, of which the first `counts[0]` count from the start of segment 0."""
        of = self._per_coordinate(counts, self.multipliers, indices.device)
        # int64, because an index times a multiplier may exceed int32.
        return indices.long() * of[1] % of[0] + of[2]

    def indices(self, positions: Tensor, counts: list[int]) -> Tensor:
        """Undo `positions`."""
        # An empty segment has no positions, and no inverse modulo 0.
        inverse = [pow(a, -1, n) if n else 0 for a, n in zip(self.multipliers, self.numels, strict=True)]
        of = self._per_coordinate(counts, inverse, positions.device)
        return ((positions - of[2]) * of[1] % of[0]).int()

    def counts_of(self, regions: list[list[Piece]]) -> list[int]:
        """How many coordinates of each segment are kept in some regions."""
        counts = [0] * len(self.numels)
        for piece in chain.from_iterable(regions):
            counts[piece.segment] += piece.kept
        return counts

    def of_kept(self, positions: Tensor) -> tuple[Tensor, list[int]]:
        """The int32 indices of the ascending positions of all kept coordinates, and how many lie in each segment."""
        return self.indices(positions, list(self.kept)), list(self.kept)

    def within(self, positions: Tensor) -> Tensor:
        """Positions of all kept coordinates, counted from the start of each segment: int32."""
        return (positions - self._per_coordinate(list(self.kept), self.multipliers, positions.device)[2]).int()

    def globally(self, within: Tensor) -> Tensor:
        """Undo `within`."""
        return within + self._per_coordinate(list(self.kept), self.multipliers, within.device)[2]

    def count(self, positions: Tensor) -> list[int]:
        """How many of some ascending positions lie in each piece; the host reads them."""
        starts = uploaded(positions.device, self.starts)
        counts: list[int] = torch.searchsorted(positions, starts).diff().tolist()
        return counts

    def _per_coordinate(self, counts: list[int], multipliers: list[int], device: torch.device) -> Tensor:
        """(3, number of coordinates): size, multiplier and base of the segment of each."""
        table = uploaded(device, [self.numels, multipliers, self.bases[:-1]])
        repeats = uploaded(device, counts)
        # With `output_size` the host need not wait until a GPU has added up the repeats.
        return table.repeat_interleave(repeats, dim=1, output_size=sum(counts))


@lru_cache(maxsize=256)
def regions(numels: tuple[int, ...], kept: tuple[int, ...], size: int) -> Regions:
    """`Regions`, made once for all rounds of the same sizes."""
    return Regions(numels, kept, size)


@lru_cache(maxsize=4096)
def spread(numel: int) -> int:
    """A multiplier that is coprime to `numel`, near its golden section.

    Example:
        >>> spread(1000)
        619
    """
    # Multiples of the golden section lie far apart modulo `numel`.
    multiplier = round(numel * 0.6180339887498949)
    while math.gcd(multiplier, numel) != 1:
        multiplier += 1
    return multiplier
