"""The record of one measurement of all lines: what `plan`, `doctor` and the layout of workers share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from ..algorithm import require
from .network import Link, Network

MOST_UNEQUAL = 16  # workers that are simulated one by one

UNEQUAL = 1.25
"""How many times faster the fastest line must be than the slowest one, for lines to count as unequal."""

Matrix = tuple[tuple[float, ...], ...]
"""(W, W): the row is the worker that sends, the column the one that receives. The diagonal is 0."""


@dataclass(frozen=True)
class Lines:
    """The lines between W workers, as a program on them sees them. `measure_lines` makes it.

    Args:
        round_trip_seconds: the shortest of several round trips of 8 bytes.
        jitter_seconds: the mean difference between one round trip and the next.
        bytes_per_second: the rate of each pair alone.
        loss: share of the sender's TCP segments that it sent again; None where the kernel does not tell.
        clock_seconds: how far the receiver's clock is ahead of the sender's.
        together: what each worker has while all use theirs, with the costs of short messages.

    Raises:
        ValueError: matrices of different sizes.

    Example:
        >>> Lines.of_rates([[0, 8e6], [2e6, 0]]).out(1)
        2000000.0
    """

    round_trip_seconds: Matrix
    jitter_seconds: Matrix
    bytes_per_second: Matrix
    loss: tuple[tuple[float | None, ...], ...]
    clock_seconds: Matrix
    together: Link

    def __post_init__(self) -> None:
        for name in ("round_trip_seconds", "jitter_seconds", "bytes_per_second", "loss", "clock_seconds"):
            matrix = getattr(self, name)
            require(
                len(matrix) == self.size and all(len(row) == self.size for row in matrix),
                f"{name} must be {self.size} x {self.size}, got rows of {[len(row) for row in matrix]}",
            )

    @classmethod
    def of_rates(
        cls, bytes_per_second: Sequence[Sequence[float]], round_trip_seconds: Sequence[Sequence[float]] | None = None
    ) -> Lines:
        """Lines of these rates, and of these round trips, that lose nothing."""
        rates, size = _matrix(bytes_per_second), len(bytes_per_second)
        zero = _matrix([[0.0] * size] * size)
        slowest = min((r for row in rates for r in row if r > 0), default=1e12)
        trips = zero if round_trip_seconds is None else _matrix(round_trip_seconds)
        return cls(trips, zero, rates, zero, zero, Link(slowest))

    @property
    def size(self) -> int:
        """Number of workers, W."""
        return len(self.round_trip_seconds)

    def out(self, rank: int) -> float:
        """The rate of a worker's line: bytes per second to the peer that takes most."""
        return max(self.bytes_per_second[rank])

    def into(self, rank: int) -> float:
        """The rate of a worker's line: bytes per second from the peer that sends most."""
        return max(row[rank] for row in self.bytes_per_second)

    def pairs(self) -> list[tuple[int, int]]:
        """All ordered pairs of different workers."""
        return [(i, j) for i in range(self.size) for j in range(self.size) if i != j]

    def on_network(self, network: Network) -> Network:
        """The network with these links: those inside nodes, and those between nodes, by their medians.

        With one worker on each node, the link between nodes is `together`, and unequal lines have rates of their own, up to
        `MOST_UNEQUAL` workers.
        """
        per_node = network.workers_per_node
        network = replace(network, workers=self.size)
        if per_node == 1:
            rates = tuple(min(self.out(rank), self.into(rank)) for rank in range(self.size))
            differ = self.size <= MOST_UNEQUAL and max(rates) > UNEQUAL * min(rates)
            return replace(network, outer=self.together, uplinks=rates if differ else ())
        inside = [(i, j) for i, j in self.pairs() if i // per_node == j // per_node]
        between = [(i, j) for i, j in self.pairs() if i // per_node != j // per_node]
        network = replace(network, inner=self._typical(inside))
        return replace(network, outer=self._typical(between)) if between else network

    def _typical(self, pairs: Sequence[tuple[int, int]]) -> Link:
        rate = median(self.bytes_per_second[i][j] for i, j in pairs)
        return Link(rate, median(self.round_trip_seconds[i][j] for i, j in pairs) / 2)


def _matrix(rows: Sequence[Sequence[Any]]) -> tuple[tuple[Any, ...], ...]:
    return tuple(tuple(row) for row in rows)
