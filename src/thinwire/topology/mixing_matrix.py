"""A graph that a user gives by its mixing matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import fsum, isfinite

from .base import SUM_TOLERANCE, Neighbours, Topology
from .undirected import cut_off


@dataclass(frozen=True, repr=False)
class MixingMatrix(Topology):
    """Any static graph, from its mixing matrix: one step is `x_i <- sum_j rows[i][j] x_j`.

    Columns must sum to one, so that the sum over workers is kept, and every diagonal entry must be positive. Push-sum needs
    no more. If rows sum to one too, it serves `Mix` and `Moniqua`; if it is symmetric besides, every gossip averager.

    Args:
        rows: W rows of W numbers from 0 to 1; a list, an array or a tensor is fine. `rows[i][j]` is the weight that worker i
            gives to what worker j sends.

    Raises ValueError for a matrix that is not square, has an entry out of range, a diagonal entry of zero or a column that
    does not sum to one, or whose graph is disconnected.

    Source: Xiao and Boyd 2004, Fast linear iterations for distributed averaging, Systems & Control Letters 53, on weights that
    converge the fastest.

    Example:
        >>> path = MixingMatrix([[0.6, 0.4, 0.0], [0.4, 0.2, 0.4], [0.0, 0.4, 0.6]])
        >>> path.neighbours(rank=0, step=0, size=3)
        Neighbours(sends={1: 0.4}, receives={1: 0.4}, self_weight=0.6)
        >>> round(path.spectral_gap(size=3), 4)
        0.4
    """

    rows: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        rows = _plain(self.rows)
        object.__setattr__(self, "rows", rows)
        size = len(rows)
        if not rows:
            raise ValueError("MixingMatrix: rows must be W rows of W numbers, got none")
        for i, row in enumerate(rows):
            if len(row) != size:
                raise ValueError(f"MixingMatrix: row {i} has {len(row)} numbers, expected {size}, one for each row")
            wrong = [j for j, weight in enumerate(row) if not (isfinite(weight) and 0 <= weight <= 1)]
            if wrong:
                raise ValueError(f"MixingMatrix: weights are 0 to 1, got {row[wrong[0]]} in row {i}, column {wrong[0]}")
            if row[i] == 0:
                raise ValueError(f"MixingMatrix: worker {i} must give itself a positive weight, got 0 on the diagonal")
        for j, total in enumerate(fsum(column) for column in zip(*rows, strict=True)):
            if abs(total - 1.0) > SUM_TOLERANCE:
                raise ValueError(f"MixingMatrix: column {j} sums to {total!r}, expected 1; divide it by its sum")
        if self._cut_off:
            raise ValueError(
                f"MixingMatrix: the graph is disconnected, no path joins rank 0 both ways with the ranks {self._cut_off[:8]}; "
                "give a positive weight to an edge between them"
            )

    @cached_property
    def _cut_off(self) -> list[int]:
        arcs = [(j, i) for i, row in enumerate(self.rows) for j, weight in enumerate(row) if weight > 0 and i != j]
        return cut_off(arcs, len(self.rows))

    def _neighbours(self, rank: int, step: int, size: int) -> Neighbours:
        sends = {i: row[rank] for i, row in enumerate(self.rows) if i != rank and row[rank] > 0}
        receives = {j: weight for j, weight in enumerate(self.rows[rank]) if j != rank and weight > 0}
        return Neighbours(sends, receives, self.rows[rank][rank])

    def _validate(self, size: int) -> None:
        if size != len(self.rows):
            raise ValueError(
                f"MixingMatrix of {len(self.rows)} rows cannot connect {size} workers; use {len(self.rows)} workers"
            )


def _plain(rows: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    """The rows as tuples of floats, from nested sequences, an array or a tensor."""
    try:
        return tuple(tuple(float(weight) for weight in row) for row in rows)
    except TypeError:
        raise ValueError(f"MixingMatrix: rows must be W rows of W numbers, got {rows!r}") from None
