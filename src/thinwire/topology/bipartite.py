"""Graphs between odd and even ranks, for asynchronous pairwise averaging (AD-PSGD, arXiv 1710.06952).

Odd ranks are *active*: at a step, active worker i exchanges with `i + d`. Even ranks are *passive*: worker j
exchanges with `j - d`, the worker that chose it. So one distance is a perfect matching of the two sides and its
matrix, at weights 1/2, is symmetric and doubly stochastic. Distances are odd, so that they join the two sides if W is
even.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .base import Neighbours
from .circulant import OddDistances, odd_powers


class Bipartite(OddDistances):
    """Uses `peers` matchings per step."""

    @staticmethod
    def is_active(rank: int) -> bool:
        """Whether a rank chooses its peer (odd), rather than waiting to be chosen (even)."""
        return rank % 2 == 1

    def _neighbours(self, rank: int, step: int, size: int) -> Neighbours:
        distances = self._distances_at(step, size)
        weight = 1.0 / (len(distances) + 1)
        # One side adds the distance that the other one subtracts, so that both name each other.
        sign = 1 if self.is_active(rank) else -1
        peers = [(rank + sign * d) % size for d in distances]
        return Neighbours(dict.fromkeys(peers, weight), dict.fromkeys(peers, weight), weight)

    def is_circulant(self, size: int, shift: int = 1) -> bool:
        self.validate(size)
        return shift % 2 == 0 or super().is_circulant(size, shift)

    def _validate(self, size: int) -> None:
        if size % 2:
            raise ValueError(
                f"{self!r} cannot connect {size} workers: odd ranks are paired with even ranks, so their number "
                f"must be even; use {size - 1} or {size + 1} workers, or Gossip(Mix(Exponential()))"
            )
        super()._validate(size)


@dataclass(frozen=True, repr=False)
class BipartiteExponential(Bipartite):
    """Odd and even ranks matched at the distances 1 and `1 + 2^i`, `i = 1..floor(log2(W - 1))`, both signs, in
    turn.

    Args:
        peers: exchanges of each worker a step; higher => faster agreement, more bytes.
        static: all distances at every step instead (`peers` is then without effect).

    Example:
        >>> [list(BipartiteExponential().neighbours(rank=1, step=step, size=8).sends) for step in range(4)]
        [[2], [0], [4], [6]]
    """

    def _distances(self, size: int) -> Iterable[int]:
        return odd_powers(size)


@dataclass(frozen=True, repr=False)
class BipartiteLinear(Bipartite):
    """Odd and even ranks matched at every odd distance, both signs, in turn; once round, all pairs of the two sides
    met.

    Args:
        peers: exchanges of each worker a step; higher => faster agreement, more bytes.
        static: all distances at every step instead (`peers` is then without effect).

    Example:
        >>> BipartiteLinear().period(size=8)
        4
        >>> list(BipartiteLinear(static=True).neighbours(rank=1, step=0, size=8).sends)
        [2, 0, 4, 6]
    """

    def _distances(self, size: int) -> Iterable[int]:
        return range(1, size, 2)
