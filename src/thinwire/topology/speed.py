"""How fast news and values spread over a graph: what step sizes of gossip follow from."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ..algorithm import require
from .base import Topology


@lru_cache(maxsize=4096)
def rounds_to_reach_all(topology: Topology, size: int, start: int = 0) -> int:
    """Rounds from step `start` until what each worker knew has reached every other; the diameter of a static graph.

    Raises ValueError where the topology cannot connect `size` workers.

    Example:
        >>> from thinwire.topology import Exponential, Ring
        >>> rounds_to_reach_all(Ring(), 8), rounds_to_reach_all(Exponential(), 8)
        (4, 3)
    """
    known, everyone, rounds = [1 << rank for rank in range(size)], (1 << size) - 1, 0
    static = len(topology.steps(size)) == 1
    senders = [list(topology.neighbours(rank, start, size).receives) for rank in range(size)]
    # In a connected graph each period carries what one worker knows to at least one more.
    limit = size * len(topology.steps(size))
    while any(ranks != everyone for ranks in known):
        require(
            rounds < limit, f"{topology!r} does not connect {size} workers: what one knows never reaches all others"
        )
        if not static:
            senders = [list(topology.neighbours(rank, start + rounds, size).receives) for rank in range(size)]
        before = list(known)  # a copy, because news passes one link a round
        for rank, peers in enumerate(senders):
            for peer in peers:
                known[rank] |= before[peer]
        rounds += 1
    return rounds


@lru_cache(maxsize=256)
def difference_rates(topology: Topology, size: int) -> tuple[float, float]:
    """How much of a difference between workers one uncompressed round removes: the least share, and the largest.

    For a symmetric matrix these are the smallest and the largest eigenvalue of `I - P` on vectors whose mean is zero,
    `1 - lambda_2` and `1 - lambda_min`. For all others they are the least and the largest singular value over all steps.
    Rounds `x += s (P x - x)` of a static undirected graph are stable for `0 < s < 2 / largest`, and fastest for
    `s = 2 / (least + largest)`. Costs a decomposition of a `size x size` matrix a step.

    Raises ValueError where the topology cannot connect `size` workers.

    Example:
        >>> from thinwire.topology import Ring
        >>> least, largest = difference_rates(Ring(), 8)
        >>> round(least, 4), round(largest, 4), round(2 / (least + largest), 4)
        (0.1953, 1.3333, 1.3084)
    """
    if size == 1:
        return 1.0, 1.0
    centre = np.eye(size) - 1.0 / size
    rates = []
    for step in topology.steps(size):
        # The mean is no difference, so its rate of zero is left out: it is the last of the descending values.
        values = np.linalg.svd(centre @ (np.eye(size) - topology.matrix(step, size)) @ centre, compute_uv=False)
        rates += [values[-2], values[0]]
    return float(min(rates)), float(max(rates))


@lru_cache(maxsize=256)
def largest_weight(topology: Topology, size: int) -> float:
    """The largest weight that any worker gives to another one, over all steps.

    Example:
        >>> from thinwire.topology import Graph
        >>> round(largest_weight(Graph(((0, 1), (1, 2), (1, 3), (1, 4), (4, 5))), 6), 4)
        0.3333
    """
    others = 1.0 - np.eye(size)
    return float(max((others * topology.matrix(step, size)).max() for step in topology.steps(size)))
