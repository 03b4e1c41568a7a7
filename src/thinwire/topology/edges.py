"""Any graph, undirected or directed, from its edges."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Any

from .base import Neighbours, Topology
from .undirected import Adjacency, Undirected, adjacency_of, cut_off, unreachable


@dataclass(frozen=True, repr=False)
class Graph(Undirected):
    """Any undirected graph, from its edges. Edges are kept sorted, each once, so that equal graphs are equal.

    Args:
        edges: pairs of ranks, in either direction; every rank has at least one, and all must be connected.
        weights: `"metropolis"` (doubly stochastic) or `"uniform"` (column-stochastic: for push-sum).

    Raises ValueError for edges that are not pairs of two different ranks; `validate` does where the graph is
    disconnected.

    Example:
        >>> Graph(edges=[(2, 1), (0, 1)])
        Graph(edges=((0, 1), (1, 2)))
    """

    edges: tuple[tuple[int, int], ...]
    weights: str = "metropolis"

    def __post_init__(self) -> None:
        super().__post_init__()
        pairs = {tuple(sorted(pair)) for pair in _checked_edges(self, self.edges)}
        object.__setattr__(self, "edges", tuple(sorted(pairs)))

    # This writes to `__dict__`, past the frozen dataclass's `__setattr__`.
    @cached_property
    def _adjacency(self) -> Adjacency:
        return adjacency_of([*self.edges, *((j, i) for i, j in self.edges)], _num_ranks(self.edges))

    @cached_property
    def _cut_off(self) -> list[int]:
        return unreachable(self._adjacency)

    def _adjacent(self, rank: int, size: int) -> Sequence[int]:
        return self._adjacency[rank]

    def _validate(self, size: int) -> None:
        _check_edges_fit(self, size)


@dataclass(frozen=True, repr=False)
class DirectedGraph(Topology):
    """Any directed graph, from its edges `(sender, receiver)`, with uniform weights: column-stochastic, for push-sum.

    Args:
        edges: pairs of ranks; there must be a path from every rank to every other.

    Raises ValueError for edges that are not pairs of two different ranks; `validate` does where a rank cannot reach
    another.

    Example:
        >>> graph = DirectedGraph(edges=((0, 1), (0, 2), (1, 2), (2, 0)))
        >>> graph.column(rank=0, step=0, size=3) == {0: 1 / 3, 1: 1 / 3, 2: 1 / 3}
        True
        >>> graph.is_doubly_stochastic(size=3)
        False
    """

    edges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "edges", tuple(sorted(set(_checked_edges(self, self.edges)))))

    @cached_property
    def _receivers(self) -> Adjacency:
        return adjacency_of(self.edges, _num_ranks(self.edges))

    @cached_property
    def _senders(self) -> Adjacency:
        return adjacency_of([(j, i) for i, j in self.edges], _num_ranks(self.edges))

    @cached_property
    def _cut_off(self) -> list[int]:
        return cut_off(self.edges, len(self._receivers))

    def _neighbours(self, rank: int, step: int, size: int) -> Neighbours:
        own = 1.0 / (1 + len(self._receivers[rank]))
        receives = {peer: 1.0 / (1 + len(self._receivers[peer])) for peer in self._senders[rank]}
        return Neighbours(dict.fromkeys(self._receivers[rank], own), receives, own)

    def _validate(self, size: int) -> None:
        _check_edges_fit(self, size)


def from_networkx(graph: Any, weights: str = "metropolis") -> Graph | DirectedGraph:
    """The topology of a networkx graph; its nodes become ranks in the order of `graph.nodes`.

    Directed graphs become a `DirectedGraph`, whose weights are uniform. Loops are left out, since every worker mixes
    with itself already; parallel edges count once; edge attributes are not read.

    Raises ValueError for a node without an edge to another.

    Example:
        >>> import networkx
        >>> from_networkx(networkx.path_graph(3))
        Graph(edges=((0, 1), (1, 2)))
    """
    rank_of = {node: rank for rank, node in enumerate(graph.nodes)}
    edges = [(rank_of[u], rank_of[v]) for u, v in graph.edges() if u != v]
    connected = {rank for edge in edges for rank in edge}
    alone = [node for node, rank in rank_of.items() if rank not in connected]
    # A single node needs no edge.
    if alone and len(rank_of) > 1:
        raise ValueError(
            f"the graph is disconnected: {alone[:8]} have no edge to another node; add some or remove them"
        )
    return DirectedGraph(tuple(edges)) if graph.is_directed() else Graph(tuple(edges), weights)


def _num_ranks(edges: Iterable[tuple[int, int]]) -> int:
    return 1 + max((max(edge) for edge in edges), default=0)


def _checked_edges(topology: Topology, edges: Iterable[Sequence[Any]]) -> list[tuple[int, int]]:
    name = type(topology).__name__
    checked = [tuple(edge) for edge in edges]
    for edge in checked:
        # NumPy's integers are `Integral` too.
        if len(edge) != 2 or not all(isinstance(rank, Integral) and int(rank) >= 0 for rank in edge):
            raise ValueError(f"{name}: an edge is a pair of ranks such as (0, 1), got {edge!r}")
        if edge[0] == edge[1]:
            raise ValueError(f"{name}: leave out the edge {edge!r}; every worker mixes with itself anyhow")
    return [(int(i), int(j)) for i, j in checked]


def _check_edges_fit(topology: Graph | DirectedGraph, size: int) -> None:
    name, num_ranks = f"{type(topology).__name__} with {len(topology.edges)} edges", _num_ranks(topology.edges)
    if num_ranks != size:
        raise ValueError(
            f"{name} cannot connect {size} workers: its edges name the ranks 0 to {num_ranks - 1}; "
            f"use {num_ranks} workers, or other edges"
        )
    cut_off = topology._cut_off  # it looks at all ranks, so not before their number fits
    if cut_off:
        raise ValueError(
            f"{name} is disconnected: no path joins rank 0 both ways with the ranks {cut_off[:8]}"
            f"{' and others' if len(cut_off) > 8 else ''}; add edges between them"
        )
