"""Topologies: the peers of each worker and their weights, as pure functions of `(rank, step, size)`. See `base`."""

from .base import Neighbours, Topology
from .bipartite import BipartiteExponential, BipartiteLinear
from .circulant import Complete, DirectedRing, Exponential, Linear, OddExponential, Ring
from .compose import Hierarchical, Phases
from .draw import draw
from .edges import DirectedGraph, Graph, from_networkx
from .mixing_matrix import MixingMatrix
from .named import DavisSouthernWomen, Hypercube, Star, Torus
from .properties import describe
from .random_graphs import ErdosRenyi, WattsStrogatz
from .random_pairs import RandomPairs

__all__ = [
    "BipartiteExponential",
    "BipartiteLinear",
    "Complete",
    "DavisSouthernWomen",
    "DirectedGraph",
    "DirectedRing",
    "ErdosRenyi",
    "Exponential",
    "Graph",
    "Hierarchical",
    "Hypercube",
    "Linear",
    "MixingMatrix",
    "Neighbours",
    "OddExponential",
    "RandomPairs",
    "Ring",
    "Phases",
    "Star",
    "Topology",
    "Torus",
    "WattsStrogatz",
    "describe",
    "draw",
    "from_networkx",
]
