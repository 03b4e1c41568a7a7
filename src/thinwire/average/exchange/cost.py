"""What each exchange costs, and which one is cheapest.

A message is m = p + d bytes: the payload and the dense vectors of one worker. N of the W workers share a node. The slow
network is the one between nodes, so the cost is what a node sends to all other nodes. With N = 1, a node is a worker.

    exchange          steps       bytes that leave a node    with N = 1
    all_reduce        2(W-1)      2(W-1)/W m                 2(W-1)/W m     a ring passes each node once
    all_gather        1           N(W-N) m                   (W-1) m
    scatter_reduce    2           2N(W-N)/W m                2(W-1)/W m     m: W times the message of the largest shard
    sparse_reduce     3           2N(W-N)/W m                2(W-1)/W m     m: W times the largest region's message
    hierarchical      1 + 2       (W/N-1) m                  (W-1) m        2 steps inside the node, if N > 1
    hierarchical_sparse  3 + 2    2(L-1)/L m                 2(W-1)/W m     L = W/N nodes; as sparse_reduce of L workers

The message of a region has the coordinates that its owner keeps, its part of the dense vectors, and half a header. So the
cost is exact where workers select as many coordinates in each region as are kept there, and a little more otherwise.

Latency is the number of steps times the latency of one message. It dominates when messages are small.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...codec import Codec
from .base import message_nbytes
from .scatter_reduce import shard_nbytes
from .sparse_reduce import header_nbytes, layout_of, message_sizes, parts_of


class Cost(NamedTuple):
    """Formulas for W workers, N per node, and a message of m bytes."""

    steps: Callable[[int, int], int]
    num_bytes: Callable[[int, int, int], float]


COSTS: dict[str, Cost] = {
    "all_reduce": Cost(lambda w, n: 2 * (w - 1), lambda w, n, m: 2 * (w - 1) * m / w),
    "all_gather": Cost(lambda w, n: 1, lambda w, n, m: n * (w - n) * m),
    "scatter_reduce": Cost(lambda w, n: 2, lambda w, n, m: 2 * n * (w - n) * m / w),
    "sparse_reduce": Cost(lambda w, n: 3, lambda w, n, m: 2 * n * (w - n) * m / w),
    "hierarchical": Cost(lambda w, n: (w > n) + 2 * (n > 1), lambda w, n, m: (w // n - 1) * m),
    "hierarchical_sparse": Cost(
        lambda w, n: 3 * (w > n) + 2 * (n > 1), lambda w, n, m: 2 * (w // n - 1) * m / (w // n)
    ),
}

# An exchange that loses twice must send this many times fewer bytes to be chosen: the second encoding of `scatter_reduce`
# adds variance, and `sparse_reduce` delivers fewer coordinates than an all-gather.
SECOND_LOSS_FACTOR = 2


@dataclass(frozen=True)
class Load:
    """What one round averages.

    Args:
        codec: the codec of the round.
        shapes: the shape of each encoded tensor.
        dense_numel: number of elements that travel dense, as float32.
        size: number of workers, W.
        workers_per_node: N.
        merged: whether all tensors are encoded as one segment.
        remembers: whether a memory keeps what is lost.
        needs_support: whether that memory learns which coordinates were sent.
    """

    codec: Codec
    shapes: tuple[torch.Size, ...]
    dense_numel: int
    size: int
    workers_per_node: int = 1
    merged: bool = False
    remembers: bool = False
    needs_support: bool = False

    def message_nbytes(self, exchange: str) -> int:
        """Bytes of the message, m."""
        shapes = list(self.shapes)
        if exchange in ("sparse_reduce", "hierarchical_sparse"):
            size = self.size if exchange == "sparse_reduce" else self.size // self.workers_per_node
            return size * self._region_nbytes(size)
        if exchange == "scatter_reduce":
            return self.size * max(shard_nbytes(self.codec, shapes, self.dense_numel, self.size, self.merged))
        return message_nbytes(self.codec, shapes, self.dense_numel, self.merged)

    def _region_nbytes(self, size: int) -> int:
        """The largest message of a region, and half a header, among `size` workers."""
        numels = [shape.numel() for shape in self.shapes]
        parts = parts_of(self.codec)
        layout = layout_of(parts, [sum(numels)] if self.merged and numels else numels, size)
        return max(message_sizes(parts, layout, self.dense_numel)) + max(header_nbytes(layout)) // 2

    def cost(self, exchange: str) -> float:
        """Bytes that leave a node in one round.

        Example:
            >>> import torch, thinwire as tw
            >>> load = Load(tw.QSGD(bits=4), shapes=(torch.Size([64, 128]),), dense_numel=0, size=8)
            >>> {name: load.cost(name) for name in ("all_gather", "scatter_reduce")}
            {'all_gather': 29120, 'scatter_reduce': 7280.0}
        """
        return COSTS[exchange].num_bytes(self.size, self.workers_per_node, self.message_nbytes(exchange))


def cheapest(load: Load) -> str:
    """The exchange for "auto": the cheapest that suits. Ties go to the order of this list.

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
    has_nodes = load.workers_per_node > 1
    keeps_largest = load.remembers and load.codec.sparse_parts() is not None
    prices = {"all_reduce": load.cost("all_reduce")} if load.codec.summable else {}
    prices["all_gather"] = load.cost("all_gather")
    if load.codec.unbiased:
        prices["scatter_reduce"] = SECOND_LOSS_FACTOR * load.cost("scatter_reduce")
    if keeps_largest:
        prices["sparse_reduce"] = SECOND_LOSS_FACTOR * load.cost("sparse_reduce")
    if has_nodes and not load.needs_support:
        prices["hierarchical"] = load.cost("hierarchical")
    if has_nodes and keeps_largest:
        prices["hierarchical_sparse"] = SECOND_LOSS_FACTOR * load.cost("hierarchical_sparse")
    return min(prices, key=prices.__getitem__)
