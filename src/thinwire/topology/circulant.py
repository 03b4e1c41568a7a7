"""Graphs that are the same from every rank: worker i sends to `i + d` modulo W for every distance d of the step.

All are regular, so uniform weights are doubly stochastic, directed or not.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

from ..options import require_integer
from .base import Neighbours, Topology

Groups = tuple[tuple[int, ...], ...]  # one group of distances a step, in the order of the period


class ByDistance(Topology):
    """A graph given by its distances: `_groups(size)` has one group for each step of the period."""

    @abstractmethod
    def _groups(self, size: int) -> Groups: ...

    def _period(self, size: int) -> int:
        return len(_distinct_groups(self, size))

    def _distances_at(self, step: int, size: int) -> tuple[int, ...]:
        groups = _distinct_groups(self, size)
        return groups[step % len(groups)]


class Circulant(ByDistance):
    """Each worker sends to the ranks at the distances after it, and receives from those before it."""

    def is_circulant(self, size: int, shift: int = 1) -> bool:
        self.validate(size)
        return True

    def _neighbours(self, rank: int, step: int, size: int) -> Neighbours:
        distances = self._distances_at(step, size)
        weight = 1.0 / (len(distances) + 1)
        return Neighbours(
            {(rank + d) % size: weight for d in distances}, {(rank - d) % size: weight for d in distances}, weight
        )


@lru_cache(maxsize=256)
def _both_ways(topology: OddDistances, size: int) -> tuple[int, ...]:
    return distinct(both_signs(topology._distances(size)), size)


@lru_cache(maxsize=256)
def _distinct_groups(topology: ByDistance, size: int) -> Groups:
    groups = tuple(distinct(group, size) for group in topology._groups(size))
    # Bidirectional distances 1 and 2 are one graph where W is 3.
    same = len({frozenset(group) for group in groups}) == 1
    return groups[:1] if same else groups


def distinct(distances: Iterable[int], size: int) -> tuple[int, ...]:
    """Distances modulo `size` in their order, each once, without 0: no double edges, and no messages to itself."""
    return tuple(dict.fromkeys(d % size for d in distances if d % size))


def windows(distances: tuple[int, ...], peers: int) -> Groups:
    """Groups of `peers` distances, cyclically through the list, until a group starts with the first distance again."""
    num_distances = len(distances)
    period = num_distances // gcd(num_distances, peers)
    return tuple(tuple(distances[(step * peers + k) % num_distances] for k in range(peers)) for step in range(period))


def both_signs(distances: Iterable[int]) -> list[int]:
    return [signed for d in distances for signed in (d, -d)]


def check_peers_exist(topology: Topology, peers: int, num_distances: int, size: int) -> None:
    if peers > num_distances:
        raise ValueError(
            f"{topology!r} cannot connect {size} workers: it asks for {peers} peers a step and each worker has "
            f"{num_distances} to choose from; use peers={num_distances} or fewer, or more workers"
        )


@dataclass(frozen=True, repr=False)
class Ring(Circulant):
    """Every worker exchanges with the next and the previous rank, at weights 1/3.

    Eigenvalues `(1 + 2 cos(2 pi k / W)) / 3`. Two workers share one edge, at weights 1/2.

    Example:
        >>> Ring().row(rank=0, step=0, size=8) == {0: 1 / 3, 1: 1 / 3, 7: 1 / 3}
        True
    """

    def _groups(self, size: int) -> Groups:
        return ((1, -1),)


@dataclass(frozen=True, repr=False)
class DirectedRing(Circulant):
    """Every worker sends to the next rank and receives from the previous one, at weights 1/2.

    Eigenvalues `(1 + exp(2 pi i k / W)) / 2`, of modulus `|cos(pi k / W)|`.

    Example:
        >>> DirectedRing().neighbours(rank=0, step=0, size=8)
        Neighbours(sends={1: 0.5}, receives={7: 0.5}, self_weight=0.5)
    """

    def _groups(self, size: int) -> Groups:
        return ((1,),)


@dataclass(frozen=True, repr=False)
class Complete(Circulant):
    """Every worker exchanges with all others, at weights 1/W: one step reaches the mean, with W - 1 messages per worker.

    Example:
        >>> Complete().matrix(step=0, size=2)
        array([[0.5, 0.5],
               [0.5, 0.5]])
    """

    def _groups(self, size: int) -> Groups:
        return (tuple(range(1, size)),)


def odd_powers(size: int) -> list[int]:
    """The distances 1 and `1 + 2^i`, `i = 1..floor(log2(W - 1))`. (i = 0 gives 2, which joins ranks of the same side.)"""
    # `bit_length` is floor(log2) + 1, without the rounding of a logarithm.
    return [1, *(1 + 2**i for i in range(1, (size - 1).bit_length()))]


@dataclass(frozen=True, repr=False)
class OddDistances(ByDistance):
    """Odd distances, forwards and backwards, `peers` of them a step; `_distances(size)` lists them."""

    peers: int = 1
    static: bool = False

    def __post_init__(self) -> None:
        require_integer(f"{type(self).__name__}: peers", self.peers, 1)

    @abstractmethod
    def _distances(self, size: int) -> Iterable[int]: ...

    def _groups(self, size: int) -> Groups:
        distances = _both_ways(self, size)
        return (distances,) if self.static else windows(distances, self.peers)

    def _validate(self, size: int) -> None:
        if not self.static:
            check_peers_exist(self, self.peers, len(_both_ways(self, size)), size)


@dataclass(frozen=True, repr=False)
class Linear(OddDistances, Circulant):
    """All odd distances, forwards and backwards, `peers` of them a step: +1, -1, +3, -3, ... (Assran et al. 2019,
    arXiv 1811.10792).

    Args:
        peers: messages that each worker sends a step; higher => faster agreement, more bytes.
        static: all distances at every step instead (`peers` is then without effect).

    Example:
        >>> [list(Linear().neighbours(rank=0, step=step, size=8).sends) for step in range(4)]
        [[1], [7], [3], [5]]
    """

    def _distances(self, size: int) -> Iterable[int]:
        return range(1, size, 2)


@dataclass(frozen=True, repr=False)
class OddExponential(OddDistances, Circulant):
    """The distances 1 and `1 + 2^i`, `i = 1..floor(log2(W - 1))`, forwards and backwards, `peers` of them a step: +1, -1, +3,
    -3, +5, -5, +9, ...

    The graph on which the scripts of Stochastic Gradient Push (Assran et al. 2019, arXiv 1811.10792) run D-PSGD; they call it
    bipartite exponential. All workers shift by the same distance: worker i sends to `i + d` and receives from `i - d`. On
    8 workers 1/4 of the disagreement is left after a period of 4 steps. `BipartiteExponential` has the same distances, but
    pairs workers, and reaches the exact mean of 8 workers in those steps.

    Args:
        peers: messages that each worker sends a step; higher => faster agreement, more bytes.
        static: all distances at every step instead (`peers` is then without effect).

    Example:
        >>> [list(OddExponential().neighbours(rank=0, step=step, size=16).sends) for step in range(8)]
        [[1], [15], [3], [13], [5], [11], [9], [7]]
    """

    def _distances(self, size: int) -> Iterable[int]:
        return odd_powers(size)


@dataclass(frozen=True, repr=False)
class Exponential(Circulant):
    """Distances that grow exponentially, one power a step. Source: Stochastic Gradient Push, Assran et al. 2019, arXiv
    1811.10792.

    At step t, worker i sends to `i + j (p+1)^(t mod T)` for `j = 1..p`, where `p = peers` and `T =
    floor(log_{p+1}(W - 1)) + 1`; with one peer that is `i + 2^(t mod T)`. If `W = (p+1)^T`, all workers hold
    the exact mean after T steps. Distances are modulo W; 0 and repeated distances of a step are left out.

    Args:
        peers: messages that each worker sends a step; higher => fewer steps to agreement, more bytes a step.
        static: the distances of all steps at every step (Ying et al. 2021, arXiv 2110.13363).
        bidirectional: both signs of every distance, so that the graph is undirected and messages double.
        alternating: both signs of every distance, one after the other: +1, -1, +2, -2, +4, -4, ..., as the scripts of
            Stochastic Gradient Push run it. A distance that equals an earlier one modulo W is left out.

    Raises ValueError for `alternating` with `static` or `bidirectional`.

    Example:
        >>> [list(Exponential().neighbours(rank=0, step=step, size=16).sends) for step in range(5)]
        [[1], [2], [4], [8], [1]]
        >>> list(Exponential(peers=2).neighbours(rank=0, step=1, size=9).sends)
        [3, 6]
        >>> [list(Exponential(alternating=True).neighbours(rank=0, step=step, size=8).sends) for step in range(6)]
        [[1], [7], [2], [6], [4], [1]]
    """

    peers: int = 1
    static: bool = False
    bidirectional: bool = False
    alternating: bool = False

    def __post_init__(self) -> None:
        require_integer(f"{type(self).__name__}: peers", self.peers, 1)
        if self.alternating and (self.static or self.bidirectional):
            raise ValueError(f"{self!r}: alternating sends one sign a step; leave out static and bidirectional")

    def _groups(self, size: int) -> Groups:
        groups: list[tuple[int, ...]] = []
        power = 1
        while power < size:
            group = [j * power for j in range(1, self.peers + 1)]
            groups.append(tuple(both_signs(group) if self.bidirectional else group))
            if self.alternating:
                groups.append(tuple(-d for d in group))
            power *= self.peers + 1
        if self.alternating:
            first: dict[frozenset[int], tuple[int, ...]] = {}
            for offsets in groups:
                first.setdefault(frozenset(distinct(offsets, size)), offsets)
            return tuple(first.values())
        return (tuple(d for group in groups for d in group),) if self.static else tuple(groups)

    def _validate(self, size: int) -> None:
        check_peers_exist(self, self.peers, size - 1, size)
