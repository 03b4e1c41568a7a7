"""The seam between a codec and whoever makes its input: a choice of coordinates that was made in the same pass."""

from __future__ import annotations

from torch import Tensor

from ..base import Codec
from ..sparse.base import Selection, Sparsifier
from ..sparse.top_k import TopK
from .chain import Chain
from .rice import GapCoded


class Preselected(Sparsifier):
    """Encodes as `sparsifier` does, for one call whose selection is known; the bytes are the same."""

    def __init__(self, sparsifier: Sparsifier, selection: Selection):
        self.sparsifier, self.selection = sparsifier, selection

    def __repr__(self) -> str:
        return repr(self.sparsifier)

    def count(self, numel: int) -> int:
        return self.sparsifier.count(numel)

    def select(self, segments: list[Tensor], keys: list[int]) -> Selection:
        return self.selection

    def _write_support(self, indices: Tensor, counts: list[int], numels: list[int], keys: list[int]) -> Tensor:
        return self.sparsifier._write_support(indices, counts, numels, keys)


def preselected(codec: Codec, selection: Selection) -> Codec:
    """`codec`, a sparsifier or a chain that begins with one, for one call of `encode` whose selection is known."""
    if isinstance(codec, Chain):
        return Chain(Preselected(codec.sparsifier, selection), codec.values)
    return Preselected(codec, selection)


def topk_counts(codec: Codec, numels: list[int]) -> list[int] | None:
    """How many coordinates `codec` keeps of segments of these sizes if it selects exactly the largest, else None."""
    sparsifier = codec.sparsifier if isinstance(codec, Chain) else codec
    sparsifier = sparsifier.sparsifier if isinstance(sparsifier, GapCoded) else sparsifier
    is_exact = isinstance(sparsifier, TopK) and sparsifier.sample is None
    return [sparsifier.count(n) for n in numels] if is_exact else None
