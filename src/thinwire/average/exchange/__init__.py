"""The exchanges of `Mean`: how workers exchange payloads. `base.py` has the contract; each exchange has a file.

Steps, and the bytes that one of W workers sends, for a payload of p bytes and d bytes of dense vectors:

    all_reduce        2(W-1) steps    2(W-1)/W (p + d)    payloads that may be added on the wire (Identity, Cast)
                      + 1 step        + (W-1) a           codecs that first agree on a bytes of numbers (TernGrad)
    all_gather        1 step          (W-1) (p + d)       any codec
    scatter_reduce    2 steps         2(W-1)/W (p + d)    any codec; the mean is encoded again
    sparse_reduce     3 steps         2(W-1)/W (p + d)    codecs that keep the largest coordinates; of their sum, the largest
    hierarchical      1 + 2 steps     (L-1) (p + d)       any codec; from one of L nodes to the others, 2 steps inside
    hierarchical_sparse    3 + 2      2(L-1)/L (p + d)    as sparse_reduce; from one of L nodes to the others, 2 steps inside

`cost.py` holds these formulas, and chooses by them for "auto".
"""

from __future__ import annotations

from collections.abc import Callable

from .agree import agreed_all_reduce
from .all_gather import all_gather
from .all_reduce import all_reduce
from .base import Finish, Flight, Job, Observe, Stages, copy_changed, flatten, result_buffers, split_like
from .cost import COSTS, Load, cheapest
from .hierarchical import agree_on_nodes, hierarchical, launched_nodes
from .hierarchical_sparse import hierarchical_sparse
from .scatter_reduce import OWNER_MEMORY, gathered_pieces, init_owner_memory, recut, scatter_reduce
from .sparse_reduce import parts_of, sparse_reduce

EXCHANGES: dict[str, Callable[[Job], Finish | Stages]] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "scatter_reduce": scatter_reduce,
    "sparse_reduce": sparse_reduce,
    "hierarchical": hierarchical,
    "hierarchical_sparse": hierarchical_sparse,
}

ONE_STEP = ("all_reduce", "all_gather")
"""The exchanges that send everything before they return."""

SPARSE = ("sparse_reduce", "hierarchical_sparse")
"""Those that select once more, of the sum; for codecs with `sparse_parts`."""

NODES = ("hierarchical", "hierarchical_sparse")
"""Those that need to know which workers share a node."""

__all__ = [
    "COSTS",
    "EXCHANGES",
    "ONE_STEP",
    "OWNER_MEMORY",
    "Finish",
    "Flight",
    "Job",
    "Load",
    "NODES",
    "SPARSE",
    "Observe",
    "Stages",
    "agree_on_nodes",
    "agreed_all_reduce",
    "cheapest",
    "copy_changed",
    "flatten",
    "gathered_pieces",
    "init_owner_memory",
    "launched_nodes",
    "parts_of",
    "recut",
    "result_buffers",
    "split_like",
]
