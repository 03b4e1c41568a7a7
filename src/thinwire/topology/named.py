"""Static undirected graphs that are known by name; graphs that are the same from every rank are in `circulant`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt

from ..options import require_integer
from .undirected import Adjacency, Undirected, adjacency_of


@dataclass(frozen=True, repr=False)
class Star(Undirected):
    """Rank 0 exchanges with everyone, the others with rank 0 only.

    Args:
        weights: `"metropolis"` (doubly stochastic) or `"uniform"` (column-stochastic: for push-sum).

    Example:
        >>> Star().row(rank=1, step=0, size=4) == {1: 0.75, 0: 0.25}
        True
    """

    weights: str = "metropolis"

    def _adjacent(self, rank: int, size: int) -> Sequence[int]:
        return (0,) if rank else range(1, size)


@dataclass(frozen=True, repr=False)
class Torus(Undirected):
    """A grid of `rows x (W / rows)` workers that wraps around; each worker exchanges with four, at weights 1/5.

    A side of two has one edge where others have two. Ranks run along rows: `rank = row * columns + column`.

    Args:
        rows: the number of rows, at least 2; None => as square as possible.

    Example:
        >>> sorted(Torus().neighbours(rank=0, step=0, size=12).sends)  # 3 rows of 4
        [1, 3, 4, 8]
    """

    rows: int | None = None

    def __post_init__(self) -> None:
        require_integer("Torus: rows", self.rows, 2, or_none=True)

    def _grid(self, size: int) -> tuple[int, int]:
        rows = self.rows or _most_square_rows(size)
        return rows, size // rows

    def _adjacent(self, rank: int, size: int) -> Sequence[int]:
        rows, columns = self._grid(size)
        row, column = divmod(rank, columns)
        vertical = [(row + step) % rows * columns + column for step in (-1, 1)]
        horizontal = [row * columns + (column + step) % columns for step in (-1, 1)]
        return sorted({*vertical, *horizontal} - {rank})

    def _validate(self, size: int) -> None:
        if self.rows is not None and (size % self.rows or size < 2 * self.rows):
            raise ValueError(
                f"{self!r} cannot connect {size} workers: it needs {self.rows} rows of equal length, "
                f"2 or more; use a multiple of {self.rows}, or rows=None"
            )
        if size > 2 and self._grid(size)[0] == 1:
            near = f"{size - 1} or {size + 1}" if size > 3 else "4"
            raise ValueError(
                f"{self!r} cannot connect {size} workers: {size} is prime, so it is no grid; "
                f"use {near} workers, or Ring()"
            )


# Asked for once for every rank and again for each of its peers.
@lru_cache(maxsize=256)
def _most_square_rows(size: int) -> int:
    return max(rows for rows in range(1, isqrt(size) + 1) if size % rows == 0)


@dataclass(frozen=True, repr=False)
class Hypercube(Undirected):
    """`W = 2^k` workers, each exchanging with the k ranks that differ from its own in one bit, at weights 1/(k+1).

    Example:
        >>> Hypercube().neighbours(rank=5, step=0, size=8).sends == {4: 0.25, 7: 0.25, 1: 0.25}
        True
    """

    def _adjacent(self, rank: int, size: int) -> Sequence[int]:
        return [rank ^ (1 << bit) for bit in range(size.bit_length() - 1)]

    def _validate(self, size: int) -> None:
        if size & (size - 1):
            lower = 1 << (size.bit_length() - 1)
            raise ValueError(
                f"{self!r} cannot connect {size} workers: their number must be a power of two; "
                f"use {lower} or {2 * lower} workers, or Exponential(bidirectional=True)"
            )


@dataclass(frozen=True, repr=False)
class DavisSouthernWomen(Undirected):
    """The social network of Davis, Gardner and Gardner (1941): 18 women and the 14 events they attended, 89 edges.

    Ranks 0 to 17 are the women and 18 to 31 the events, both in the order of networkx. Degrees run from 2 to 14.

    Args:
        weights: `"metropolis"` (doubly stochastic) or `"uniform"` (column-stochastic: for push-sum).

    Example:
        >>> list(DavisSouthernWomen().neighbours(rank=16, step=0, size=32).sends)  # Olivia Carleton: events 9 and 11
        [26, 28]
    """

    weights: str = "metropolis"

    def _adjacent(self, rank: int, size: int) -> Sequence[int]:
        return _davis()[rank]

    def _validate(self, size: int) -> None:
        if size != 32:
            raise ValueError(
                f"{self!r} cannot connect {size} workers: this social network has 32 members; "
                f"use 32 workers, or WattsStrogatz()"
            )


@lru_cache(maxsize=1)
def _davis() -> Adjacency:
    import networkx  # PyTorch needs it too

    graph = networkx.convert_node_labels_to_integers(networkx.davis_southern_women_graph())
    return adjacency_of(graph.to_directed().edges, size=32)
