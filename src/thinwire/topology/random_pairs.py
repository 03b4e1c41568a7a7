"""Random pairs: in each step, every worker exchanges with one other worker."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..options import require_integer
from .base import Neighbours, Topology
from .circulant import Circulant, Groups
from .random_graphs import UniformStream

MOST_STEPS = 4096  # workers check the weights of each


@dataclass(frozen=True, repr=False)
class RandomPairs(Topology):
    """A random perfect matching in each step, a function of seed, step and number of workers; both weights are 1/2.

    Of an odd number of workers, one has no peer in a step. The matrix of a step is symmetric and doubly stochastic. In the
    mean over steps one round multiplies the squared disagreement by `1/2 (1 - 1/(W-1))` for even W. After `num_steps` steps
    the pairs repeat.

    Args:
        seed: of the pairs; the same on all workers.
        num_steps: how many steps have pairs of their own, 1 to 4096.

    Raises:
        ValueError: a value out of range.

    Source: Kolehmainen et al. 2025, NoLoCo, arXiv 2506.10911; Boyd et al. 2006, Randomized gossip algorithms.

    Example:
        >>> from thinwire.topology import RandomPairs
        >>> [RandomPairs().neighbours(0, step, 4).sends for step in range(3)]
        [{3: 0.5}, {2: 0.5}, {2: 0.5}]
    """

    seed: int = 0
    num_steps: int = 64

    def __post_init__(self) -> None:
        require_integer("RandomPairs: seed", self.seed, 0)
        require_integer("RandomPairs: num_steps", self.num_steps, 1, MOST_STEPS)

    def _period(self, size: int) -> int:
        return 1 if size == 2 else self.num_steps  # two workers have one pairing

    def _neighbours(self, rank: int, step: int, size: int) -> Neighbours:
        peer = _matching(self.seed, step % self._period(size), size)[rank]
        if peer == rank:
            return Neighbours({}, {}, 1.0)
        return Neighbours({peer: 0.5}, {peer: 0.5}, 0.5)

    def planned(self, size: int) -> Topology:
        # They look alike from all ranks, so a plan needs to follow one only.
        return self if size % 2 else _EachDistance()


@dataclass(frozen=True, repr=False)
class _EachDistance(Circulant):
    """One message to another worker in each step, to each as often as in random pairs: over all distances, or 64 of them."""

    def _groups(self, size: int) -> Groups:
        number = min(size - 1, 64)
        return tuple((1 + i * (size - 2) // max(1, number - 1),) for i in range(number))


@lru_cache(maxsize=MOST_STEPS)
def _matching(seed: int, step: int, size: int) -> tuple[int, ...]:
    """The peer of each rank; its own rank if it has none."""
    # A stable sort, so that equal numbers have the same order on every machine.
    order = np.argsort(UniformStream(seed, size, step)(size), kind="stable").tolist()
    peers = list(range(size))
    # Of an odd number, the last one stays without a peer.
    for a, b in zip(order[0::2], order[1::2], strict=False):
        peers[a], peers[b] = b, a
    return tuple(peers)
