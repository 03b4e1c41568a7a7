"""The base of static undirected graphs: weights from the peers of each rank, and a check that it is connected."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from math import fsum

from ..options import require_choice
from .base import Neighbours, Topology

Adjacency = tuple[tuple[int, ...], ...]  # the sorted peers of every rank


class Undirected(Topology):
    """A static undirected graph given by the peers of each rank, `_adjacent(rank, size)`."""

    weights: str = "uniform"  # a field in subclasses with different degrees

    def __post_init__(self) -> None:
        require_choice(f"{type(self).__name__}: weights", self.weights, ("metropolis", "uniform"))

    @abstractmethod
    def _adjacent(self, rank: int, size: int) -> Sequence[int]: ...

    def _neighbours(self, rank: int, step: int, size: int) -> Neighbours:
        degrees = {peer: len(self._adjacent(peer, size)) for peer in self._adjacent(rank, size)}
        own = len(degrees)
        if self.weights == "metropolis":
            edges = {peer: 1.0 / (1 + max(own, degree)) for peer, degree in degrees.items()}
            return Neighbours(edges, dict(edges), 1.0 - fsum(edges.values()))
        sends = dict.fromkeys(degrees, 1.0 / (1 + own))
        return Neighbours(sends, {peer: 1.0 / (1 + degree) for peer, degree in degrees.items()}, 1.0 / (1 + own))


def unreachable(adjacency: Sequence[Sequence[int]]) -> list[int]:
    """The ranks that no path from rank 0 reaches."""
    seen, frontier = {0}, [0]
    while frontier:
        frontier = sorted({peer for rank in frontier for peer in adjacency[rank]} - seen)
        seen.update(frontier)
    return [rank for rank in range(len(adjacency)) if rank not in seen]


def cut_off(arcs: Iterable[tuple[int, int]], size: int) -> list[int]:
    """The ranks that no path joins with rank 0 both ways, from pairs (sender, receiver)."""
    forwards = list(arcs)
    backwards = [(receiver, sender) for sender, receiver in forwards]
    return sorted({rank for way in (forwards, backwards) for rank in unreachable(adjacency_of(way, size))})


def adjacency_of(arcs: Iterable[tuple[int, int]], size: int) -> Adjacency:
    """The sorted peers that each rank sends to, from pairs (sender, receiver)."""
    peers: list[set[int]] = [set() for _ in range(size)]
    for sender, receiver in arcs:
        peers[sender].add(receiver)
    return tuple(tuple(sorted(p)) for p in peers)
