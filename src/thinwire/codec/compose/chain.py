"""`chain`: a sparsifier, then a codec for the values that it keeps, then entropy coders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from ...algorithm import Algorithm, require
from ...options import require_kind
from ..base import Codec
from ..sparse.base import Sparsifier
from ..sparse.payload import SparseCodec
from ..traits import Traits
from ..types import Key
from .huffman import Huffman, HuffmanCoded
from .rice import GapCoded, Rice
from .transform import Transform, Transformed


@dataclass(frozen=True, repr=False)
class Chain(SparseCodec):
    """The result of `chain(sparsifier, values)`: the payload is [values, as the second codec sends them][support].

    The residual is exact: the values that the sparsifier drops, and the error of the second codec on the others.
    """

    sparsifier: Sparsifier
    values: Codec

    def __post_init__(self) -> None:
        _ = self.traits  # refuses what it does not carry

    @cached_property
    def traits(self) -> Traits:
        first, second = self.sparsifier.traits, self.values.traits
        first.check(self.sparsifier, "chain, first link", ("shared_key",))
        sparse = None
        # A sparse all-reduce encodes sums once more, each owner with a key of its own: that is no vote, and no shared key.
        if first.sparse is not None and not (second.votes or second.shared_key):
            sparse = first.sparse._replace(values=self.values)
        return second.through(
            self.values,
            "chain, second link",
            ("shared_key", "votes", "adaptive"),
            unbiased=first.unbiased and second.unbiased,
            lossless=first.lossless and second.lossless,
            fixed_size=first.fixed_size and second.fixed_size,
            sum_dtype=second.sum_dtype if first.shared_key else None,  # all workers keep the same coordinates
            shared_key=first.shared_key or second.shared_key,
            sparse=sparse,
        )

    def selector_and_values(self) -> tuple[Sparsifier, Codec]:
        return self.sparsifier, self.values

    def combine(self, totals: list[Tensor]) -> None:
        self.values.combine(totals)

    def reaching(self, segments: Sequence[Tensor], keys: Sequence[Key]) -> Sequence[Tensor]:
        """What reaches it of the values that the sparsifier keeps."""
        flat = [s.detach().to(torch.float32).reshape(-1).contiguous() for s in segments]
        kept = self.sparsifier.select(flat, [key.mixed() for key in keys])
        return self.values.reaching(kept.values.split(kept.counts), keys)

    def _links(self) -> tuple[Algorithm, ...]:
        first, *coders = self.sparsifier._links()
        return (first, *self.values._links(), *coders)


def chain(first: Codec | Transform, *links: Codec | Huffman | Rice) -> Codec:
    """Compose codecs: keep few coordinates, send their values through another codec, and code symbols and indices.

    A transform such as `Tiles(64)` or `DCT(64)` may stand before all of them; the codecs then work on new coordinates.

    Args:
        first: a sparsifier such as `TopK(0.01)`, whose kept values go through the next link, or a codec such as
            `QSGD(bits=4)` whose symbols do.
        links: a codec for the kept values, whose buckets are runs of them. Entropy coders may follow: `Huffman()` for
            the symbols of the codec before it, `Rice()` for the indices. With them the size depends on the data.

    Raises:
        ValueError: links that do not fit together.

    Example:
        >>> import thinwire as tw
        >>> codec = tw.chain(tw.TopK(0.01), tw.QSGD(bits=4))
        >>> round(4 * 1_000_000 / codec.nbytes(1_000_000))  # times smaller than float32
        253
        >>> tw.chain(tw.TopK(0.01), tw.QSGD(bits=4), tw.codec.Huffman()).traits.fixed_size
        False
        >>> tw.chain(tw.TopK(0.01), tw.QSGD(bits=4), tw.codec.Rice())
        chain(TopK(ratio=0.01), QSGD(bits=4), Rice())
    """
    if isinstance(first, Transform):
        require(
            len(links) > 0 and isinstance(links[0], Codec),
            f"chain: after {first} stands a codec such as BlockwiseTopK(0.02)",
        )
        codec, *coders = links
        assert isinstance(codec, Codec)
        return Transformed(chain(codec, *coders) if coders else codec, first)
    require_kind("chain: the first link", first, Codec, "a codec such as TopK(0.01)")
    require(len(links) > 0, "chain: give at least two links, such as TopK(0.01) and QSGD(bits=4)")
    if isinstance(first, (Chain, Transformed)):
        return chain(*cast(Any, first._links()), *links)
    *others, last = links
    if isinstance(last, Rice):
        if not isinstance(first, Sparsifier):
            raise ValueError(f"chain: Rice codes the indices of a sparsifier, and {first} sends none")
        # Rice codes indices, so it wraps the first link, whatever stands between.
        gap_coded = GapCoded(first)
        return chain(gap_coded, *others) if others else gap_coded
    if isinstance(last, Huffman):
        coded = others[-1] if others else first
        if not isinstance(coded, Codec):
            raise ValueError(f"chain: {last} codes the symbols of the codec before it, and {coded} is no codec")
        # Huffman codes symbols, so it wraps the codec right before it.
        huffman_coded = HuffmanCoded(coded)
        return chain(first, *others[:-1], huffman_coded) if others else huffman_coded
    require(not others, f"chain: between sparsifier and entropy coder stands one codec, got {list(links)}")
    if not isinstance(first, Sparsifier):
        raise ValueError(f"chain: the first link must be a sparsifier such as TopK, got {first}")
    if not isinstance(last, Codec) or isinstance(last, (Sparsifier, Chain)):
        raise ValueError(f"chain: the second link must be a codec for the kept values, such as QSGD, got {last}")
    return Chain(first, last)
