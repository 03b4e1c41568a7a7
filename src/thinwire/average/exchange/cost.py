"""What each exchange costs, and which one is cheapest.

A message is m = p + d bytes: the payload and the dense vectors of one worker. Of W workers, N share a node. The wire
that is slow is the one between nodes, so the cost is what a node sends to all others; with N = 1, what a worker sends.

    exchange          steps       bytes that leave a node    with N = 1
    all_reduce        2(W-1)      2(W-1)/W m                 2(W-1)/W m     a ring passes each node once
    all_gather        1           N(W-N) m                   (W-1) m
    scatter_reduce    2           2N(W-N)/W m                2(W-1)/W m     m: W times the message of the largest shard
    hierarchical      1 + 2       (W/N-1) m                  (W-1) m        2 steps inside the node, if N > 1

Latency is the steps times that of one message; it decides where messages are small.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...codec import Codec
from .base import message_nbytes
from .scatter_reduce import shard_nbytes


class Cost(NamedTuple):
    """Formulas of W workers, N of them in a node, and a message of m bytes."""

    steps: Callable[[int, int], int]
    num_bytes: Callable[[int, int, int], float]


COSTS: dict[str, Cost] = {
    "all_reduce": Cost(lambda w, n: 2 * (w - 1), lambda w, n, m: 2 * (w - 1) * m / w),
    "all_gather": Cost(lambda w, n: 1, lambda w, n, m: n * (w - n) * m),
    "scatter_reduce": Cost(lambda w, n: 2, lambda w, n, m: 2 * n * (w - n) * m / w),
    "hierarchical": Cost(lambda w, n: (w > n) + 2 * (n > 1), lambda w, n, m: (w // n - 1) * m),
}

# How many times fewer bytes `scatter_reduce` must send before it is chosen: the variance of its second encoding counts.
SECOND_LOSS_FACTOR = 2


@dataclass(frozen=True)
class Load:
    """What is averaged in a round.

    Args:
        codec: what crosses the wire.
        shapes: of each tensor that is encoded.
        dense_numel: elements that travel unencoded, as float32.
        size: number of workers, W.
        workers_per_node: N.
        merged: whether all tensors are encoded as one segment.
    """

    codec: Codec
    shapes: tuple[torch.Size, ...]
    dense_numel: int
    size: int
    workers_per_node: int = 1
    merged: bool = False

    def message_nbytes(self, exchange: str) -> int:
        """Bytes of the message, m."""
        shapes = list(self.shapes)
        if exchange == "scatter_reduce":
            return self.size * max(shard_nbytes(self.codec, shapes, self.dense_numel, self.size, self.merged))
        return message_nbytes(self.codec, shapes, self.dense_numel, self.merged)

    def cost(self, exchange: str) -> float:
        """Bytes that leave a node in one round; with nodes of one worker, bytes that a worker sends.

        Example:
            >>> import torch, thinwire as tw
            >>> load = Load(tw.QSGD(bits=4), shapes=(torch.Size([64, 128]),), dense_numel=0, size=8)
            >>> {name: load.cost(name) for name in ("all_gather", "scatter_reduce")}
            {'all_gather': 29120, 'scatter_reduce': 7280.0}
        """
        return COSTS[exchange].num_bytes(self.size, self.workers_per_node, self.message_nbytes(exchange))


def cheapest(load: Load) -> str:
    """The exchange for "auto": the cheapest of those that suit, the first named one of equals.

    `all_reduce` suits summable codecs; `hierarchical` nodes of several workers; `all_gather` always. `scatter_reduce`
    encodes twice: it suits unbiased codecs, whose result keeps its mean, and must be cheaper by more than
    `SECOND_LOSS_FACTOR`, which takes W > 4. A biased codec trains differently with it, memory or not, so the user has
    to ask for it. The choice depends on the load alone, so it is the same on all workers.
    """
    prices = {"all_reduce": load.cost("all_reduce")} if load.codec.summable else {}
    prices["all_gather"] = load.cost("all_gather")
    if load.codec.unbiased:
        prices["scatter_reduce"] = SECOND_LOSS_FACTOR * load.cost("scatter_reduce")
    if load.workers_per_node > 1:
        prices["hierarchical"] = load.cost("hierarchical")
    return min(prices, key=prices.__getitem__)
