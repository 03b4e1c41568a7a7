"""All exchanges by their word, and the choice among them.

An installed package declares an exchange of its own in the entry-point group `thinwire.exchanges`, under its word:

    [project.entry-points."thinwire.exchanges"]
    star = "my_package.star:Star"

The entry point is loaded when a `Mean` first names the word. "auto" never takes such an exchange.
"""

from __future__ import annotations

from functools import cache

from ....algorithm import require
from ....entry_points import declared, load
from .all_gather import AllGather
from .all_reduce import AllReduce
from .contract import Exchange, Load
from .hierarchical import HierarchicalReduce
from .hierarchical_sparse import HierarchicalSparse
from .scatter_reduce import ScatterReduce
from .sparse_reduce import SparseReduce

EXCHANGES: dict[str, Exchange] = {
    exchange.word: exchange
    for exchange in (
        AllReduce(),
        AllGather(),
        ScatterReduce(),
        SparseReduce(),
        HierarchicalReduce(),
        HierarchicalSparse(),
    )
}
"""In this order "auto" prefers them where their prices are equal."""

ENTRY_POINT_GROUP = "thinwire.exchanges"


def find_exchange(word: str) -> Exchange | None:
    """The exchange that a word names, in `EXCHANGES` or in an installed package; None if there is none.

    Raises:
        ValueError: the package's entry point cannot be used.
    """
    return EXCHANGES.get(word) or _declared(word)


def known_words() -> list[str]:
    """The words of all exchanges, without loading entry points."""
    return [*EXCHANGES, *sorted(declared(ENTRY_POINT_GROUP).keys() - EXCHANGES.keys())]


@cache
def _declared(word: str) -> Exchange | None:
    def made(cls: type[Exchange]) -> Exchange:
        is_exchange = isinstance(cls, type) and issubclass(cls, Exchange)
        require(is_exchange and cls.word == word, f"it must be a class derived from Exchange, with word = {word!r}")
        return cls()

    entry = declared(ENTRY_POINT_GROUP).get(word)
    return None if entry is None else load(entry, made)


def cheapest(load: Load) -> Exchange:
    """The exchange for "auto": the cheapest that suits. Ties go to the order of `EXCHANGES`.

        all_reduce        summable codecs
        all_gather        any codec
        scatter_reduce    unbiased codecs, if it is cheaper by more than `SECOND_LOSS_FACTOR`, which needs W > 4
        sparse_reduce     codecs that keep the largest coordinates, with a memory, if cheaper by more than that factor
        hierarchical      nodes of several workers, unless the memory needs the support
        hierarchical_sparse   nodes of several workers; as `sparse_reduce`

    `scatter_reduce` encodes twice. An unbiased codec keeps its mean under a second encoding. A biased one trains
    differently, with or without memory, so the user has to ask for it. The choice depends on the load only, so it is
    the same on all workers.
    """
    return min((e for e in EXCHANGES.values() if e.suits(load)), key=lambda exchange: exchange.price(load))
