"""The exchanges of `Mean`: how workers exchange payloads. `base.py` has the contract; each exchange has a file.

Steps, and the bytes that one of W workers sends, for a payload of p bytes and d bytes of dense vectors:

    all_reduce        2 steps         2(W-1)/W (p + d)    payloads that may be added on the wire (Identity, Cast)
                      + 1 step        + (W-1) a           codecs that first agree on the maxima of a bytes (TernGrad)
                      + 2 steps       + 2(W-1)/W a        or on their sums (CoarseGrainedTopK)
    all_gather        1 step          (W-1) (p + d)       any codec
    scatter_reduce    2 steps         2(W-1)/W (p + d)    any codec; the mean is encoded again
    sparse_reduce     3 steps         2(W-1)/W (p + d)    codecs that keep the largest coordinates; of their sum, the largest
    hierarchical      1 + 2 steps     (L-1) (p + d)       any codec; from one of L nodes to the others, 2 steps inside
    hierarchical_sparse    3 + 2      2(L-1)/L (p + d)    as sparse_reduce; from one of L nodes to the others, 2 steps inside

Bytes that leave a node of N workers, for a message of m = p + d bytes:

    all_reduce                2(L-1)/L m          L = W/N
    all_gather                N(W-N) m
    scatter_reduce            2N(W-N)/W m         m: W times the message of the largest shard
    sparse_reduce             2N(W-N)/W m         m: W times the largest region's message
    hierarchical              (W/N-1) m
    hierarchical_sparse       2(L-1)/L m          as `sparse_reduce` of L workers

An all-reduce takes one step between two workers, and four by nodes: see `comm/sums.py`. Over NCCL it goes around a ring, in
2(W-1) steps, and 2(W-1)/W m leave a node.

Each exchange is an object that has these formulas; `words.py` finds it by its word, and chooses by them for "auto".
"""

from __future__ import annotations

from .contract import Exchange, Load
from .words import EXCHANGES, cheapest, find_exchange, known_words

__all__ = ["EXCHANGES", "Exchange", "Load", "cheapest", "find_exchange", "known_words"]
