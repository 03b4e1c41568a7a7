"""All exchanges by their word, and the choice among them."""

from __future__ import annotations

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
