"""Random undirected graphs that are functions of their seed: the same on every worker, machine and NumPy version.

Uniform numbers are the raw output of PCG64, which NumPy keeps stable, unlike its distributions. A disconnected
graph is drawn again from the next substream, which keeps the distribution of the graph given that it is connected.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import log

import numpy as np

from ..options import require_integer, require_number
from .undirected import Adjacency, Undirected, adjacency_of, unreachable

MAX_ATTEMPTS = 100


class RandomGraph(Undirected):
    """An undirected graph drawn from `_draw(uniform, size)` until it is connected, then remembered."""

    seed: int

    def __post_init__(self) -> None:
        super().__post_init__()
        require_integer(f"{type(self).__name__}: seed", self.seed, 0)

    @abstractmethod
    def _draw(self, uniform: UniformStream, size: int) -> list[tuple[int, int]]: ...

    def _adjacent(self, rank: int, size: int) -> Sequence[int]:
        return _connected(self, size)[rank]

    def _validate(self, size: int) -> None:
        _connected(self, size)


class UniformStream:
    """Uniform numbers in [0, 1) of 53 bits; attempts and sizes have streams of their own."""

    def __init__(self, seed: int, size: int, attempt: int) -> None:
        self._bits = np.random.PCG64(np.random.SeedSequence((seed, size, attempt)))

    def __call__(self, count: int) -> np.ndarray:
        # The upper 53 bits: as many as a float64 has.
        return (self._bits.random_raw(count) >> np.uint64(11)) * 2.0**-53

    def below(self, bound: int) -> int:
        return int(self(1)[0] * bound)


@lru_cache(maxsize=64)
def _connected(topology: RandomGraph, size: int) -> Adjacency:
    for attempt in range(MAX_ATTEMPTS):
        edges = topology._draw(UniformStream(topology.seed, size, attempt), size)
        adjacency = adjacency_of([*edges, *((j, i) for i, j in edges)], size)
        if not unreachable(adjacency):
            return adjacency
    raise ValueError(
        f"{topology!r} cannot connect {size} workers: {MAX_ATTEMPTS} draws were all disconnected; "
        f"use more edges (a higher probability or degree)"
    )


@dataclass(frozen=True, repr=False)
class ErdosRenyi(RandomGraph):
    """Every pair of workers has an edge with the same probability, given that the graph is connected.

    Args:
        probability: of an edge; lower => fewer messages, slower agreement. None takes twice the threshold of
            connectedness, `2 ln(W) / W`, so that degrees grow as `2 ln W`.
        seed: of the graph; not negative.
        weights: `"metropolis"` (doubly stochastic) or `"uniform"` (column-stochastic: for push-sum).

    Raises ValueError in `validate` where 100 draws were all disconnected.

    Example:
        >>> ErdosRenyi(seed=1).is_doubly_stochastic(size=16)
        True
    """

    probability: float | None = None
    seed: int = 0
    weights: str = "metropolis"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("ErdosRenyi: probability", self.probability, least=0, most=1, or_none=True)

    def _draw(self, uniform: UniformStream, size: int) -> list[tuple[int, int]]:
        probability = 2 * log(size) / size if self.probability is None else self.probability
        first, second = np.triu_indices(size, k=1)
        chosen = uniform(len(first)) < probability
        return list(zip(first[chosen].tolist(), second[chosen].tolist(), strict=True))


@dataclass(frozen=True, repr=False)
class WattsStrogatz(RandomGraph):
    """A small world: a ring where each worker knows its `degree` nearest, with some edges rewired, connected.

    With an odd degree every second worker knows one more, at distance `(degree + 1) / 2`; networkx rounds an odd degree down.
    Each edge `(i, i + d)`, `d = 1..degree/2`, moves its far end with probability `rewire` to a rank drawn
    uniformly among those that are not yet peers of i (Watts and Strogatz, Nature 393, 1998). Where `degree >= W - 1`
    it is complete.

    Args:
        degree: the mean number of peers, 2 or more; higher => faster agreement, more bytes.
        rewire: probability that an edge is rewired; 0 is a ring lattice, 1 almost a random graph.
        seed: of the graph; not negative.
        weights: `"metropolis"` (doubly stochastic) or `"uniform"` (column-stochastic: for push-sum).

    Raises ValueError in `validate` where 100 draws were all disconnected.

    Example:
        >>> WattsStrogatz(rewire=0.0).row(rank=0, step=0, size=8).keys() == {0, 1, 2, 6, 7}
        True
    """

    degree: int = 4
    rewire: float = 0.2
    seed: int = 0
    weights: str = "metropolis"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("WattsStrogatz: rewire", self.rewire, least=0, most=1)
        require_integer("WattsStrogatz: degree", self.degree, 2)

    def _draw(self, uniform: UniformStream, size: int) -> list[tuple[int, int]]:
        degree = min(self.degree, size)  # complete all the same
        lattice = [(rank, (rank + d) % size) for d in range(1, degree // 2 + 1) for rank in range(size)]
        if degree % 2:
            far = degree // 2 + 1
            # Half way round, a worker and its peer have the same edge.
            lattice += [(rank, (rank + far) % size) for rank in (range(far) if 2 * far == size else range(0, size, 2))]
        peers: list[set[int]] = [set() for _ in range(size)]
        for i, j in lattice:
            _connect(peers, i, j)
        # The choice of edges is drawn before all new ends: the order of draws defines the graph.
        for (i, j), moves in zip(lattice, uniform(len(lattice)) < self.rewire, strict=True):
            # A small ring lists an edge twice, so it may have moved already.
            if moves and j in peers[i] and len(peers[i]) < size - 1:
                _rewire(peers, i, j, uniform)
        return [(i, j) for i in range(size) for j in sorted(peers[i]) if i < j]


def _connect(peers: list[set[int]], i: int, j: int) -> None:
    if i != j:  # on a small ring, a distance may lead back to the rank itself
        peers[i].add(j)
        peers[j].add(i)


def _rewire(peers: list[set[int]], i: int, j: int, uniform: UniformStream) -> None:
    # It ends: the caller has checked that a rank is left.
    new = uniform.below(len(peers))
    while new == i or new in peers[i]:
        new = uniform.below(len(peers))
    peers[i].remove(j)
    peers[j].remove(i)
    _connect(peers, i, new)
