"""The contract of a topology: the peers of each worker in a step, and their weights.

A topology is a frozen description without connections, tensors or state. All its properties are pure functions of
`(rank, step, size)`, where `size` is the number of workers W and ranks are `0..W-1`. So every worker computes the same
graph by itself, and a topology can be drawn, tested and compared without a network.

**Mixing matrix.** One step of gossip is `x_i <- sum_j P[i, j] x_j` for every rank i. Row `P[i, :]` has the weights of
the values that worker i receives; column `P[:, i]` has the weights with which others use its value. Worker i *sends
to* every j != i with `P[j, i] > 0` and *receives from* every j != i with `P[i, j] > 0`. `P[i, i]` is always positive.

**Weights.** `"uniform"`: worker i gives every peer, and itself, `1 / (number of peers it sends to + 1)` of its
value. This is column-stochastic on every graph, as push-sum requires, and doubly stochastic if all workers have the same
number of peers. `"metropolis"` (Metropolis-Hastings; undirected graphs only): `P[i, j] = 1 / (1 +
max(degree_i, degree_j))` on edges, and each worker keeps the rest. This is symmetric and doubly stochastic on every
undirected graph, so it is the default if degrees may differ. On regular graphs the two are equal.

**Time.** A time-varying topology repeats after `period(size)` steps; `Phases` repeats only from its last phase on. For any
topology, `steps` lists steps that together have all of its matrices.

**Guarantees**, for every topology that `validate` accepts: if i sends to j at a step, then j receives from i at that
step with the same weight; each column sums to one; no worker is its own peer, and no peer is listed twice; a single worker
(`size == 1`) is always accepted and mixes with itself.

**To write a topology**, derive from `Topology` as a frozen dataclass with `repr=False`, and define `_neighbours`, which is
called only with a valid rank and size >= 2. Override `_validate` and `_period` where needed.
`thinwire.testing.check_topology` checks the guarantees.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from math import fsum
from typing import NamedTuple

import numpy as np

from ..algorithm import Algorithm

SUM_TOLERANCE = 1e-12  # sums of up to some thousand float64 weights near 1/W
# Rounding leaves 1e-17 where a product averages exactly, and the root over the period would enlarge it.
ZERO_MODULUS = 1e-12


class Neighbours(NamedTuple):
    """One worker's part in one step: its column (`sends`) and its row (`receives`) without the diagonal."""

    sends: dict[int, float]
    """`{peer: P[peer, rank]}`: the weight that the peer gives to what this worker sends."""
    receives: dict[int, float]
    """`{peer: P[rank, peer]}`: the weight that this worker gives to what it receives."""
    self_weight: float
    """`P[rank, rank]`."""


class Topology(Algorithm, ABC):
    """A communication graph with mixing weights. See this module's docstring for the contract."""

    @abstractmethod
    def _neighbours(self, rank: int, step: int, size: int) -> Neighbours: ...

    def _period(self, size: int) -> int:
        return 1

    def _validate(self, size: int) -> None:
        return None

    def _steps(self, size: int) -> Sequence[int]:
        return range(self._period(size))

    def validate(self, size: int, rank: int = 0) -> None:
        """Raise ValueError with the reason and a remedy if this topology cannot connect `size` workers.

        Example:
            >>> from thinwire.topology import Torus
            >>> Torus().validate(7)
            Traceback (most recent call last):
            ValueError: Torus() cannot connect 7 workers: 7 is prime, so it is no grid; use 6 or 8 workers, or Ring()
        """
        if size < 1:
            raise ValueError(f"{self!r} needs at least 1 worker, got size={size}")
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is out of range: {size} workers have the ranks 0 to {size - 1}")
        if size > 1:
            self._validate(size)

    def neighbours(self, rank: int, step: int, size: int) -> Neighbours:
        """The peers that `rank` sends to and receives from at `step`, with weights, without building the matrix.

        Raises ValueError as `validate` does, and for a negative step.

        Example:
            >>> from thinwire.topology import Exponential
            >>> Exponential().neighbours(rank=0, step=1, size=8)
            Neighbours(sends={2: 0.5}, receives={6: 0.5}, self_weight=0.5)
        """
        self.validate(size, rank)
        if step < 0:
            raise ValueError(f"steps are counted from 0, got step={step}")
        own: object = self._neighbours(rank, step, size) if size > 1 else Neighbours({}, {}, 1.0)
        if not isinstance(own, Neighbours):
            raise ValueError(f"{self!r}: _neighbours returns Neighbours, got {own!r:.100} for rank {rank} of {size}")
        return own

    def row(self, rank: int, step: int, size: int) -> dict[int, float]:
        """The nonzero entries of `P[rank, :]` as `{peer: weight}`, own weight first."""
        own = self.neighbours(rank, step, size)
        return {rank: own.self_weight, **own.receives}

    def column(self, rank: int, step: int, size: int) -> dict[int, float]:
        """The nonzero entries of `P[:, rank]` as `{peer: weight}`, own weight first."""
        own = self.neighbours(rank, step, size)
        return {rank: own.self_weight, **own.sends}

    def matrix(self, step: int, size: int) -> np.ndarray:
        """The mixing matrix `P` of a step, float64 of shape `(size, size)`.

        Example:
            >>> from thinwire.topology import DirectedRing
            >>> DirectedRing().matrix(step=0, size=3)
            array([[0.5, 0. , 0.5],
                   [0.5, 0.5, 0. ],
                   [0. , 0.5, 0.5]])
        """
        return self._rows(step, size, size)

    def _rows(self, step: int, size: int, num_rows: int) -> np.ndarray:
        """The first rows of the mixing matrix."""
        rows = np.zeros((num_rows, size))
        for rank in range(num_rows):
            row = self.row(rank, step, size)
            rows[rank, list(row)] = list(row.values())
        return rows

    def period(self, size: int) -> int:
        """The number of steps after which the graph repeats; 1 for a static graph."""
        self.validate(size)
        return self._period(size) if size > 1 else 1

    def steps(self, size: int) -> Sequence[int]:
        """Steps that together have all matrices of the topology; the last `period(size)` of them repeat for ever."""
        self.validate(size)
        return self._steps(size) if size > 1 else range(1)

    def spectral_gap(self, size: int) -> float:
        """The speed of gossip, `1 - rho`: in the long run the disagreement shrinks as `rho^step`.

        `rho = |lambda_2(P(T-1) ... P(1) P(0))|^(1/T)`, with T the period and `lambda_2` the eigenvalue of second
        largest *modulus*. For a static graph T is 1 and this is the usual `1 - |lambda_2(P)|`. It is 1 where all
        workers agree exactly after one period, and for a lone worker. (Boyd et al., Randomized gossip algorithms, 2006.)

        Costs an eigenvalue problem of `size` and, for time-varying graphs, T products of matrices. Where all workers do the
        same, or every s-th one, Fourier transforms make that `size / s` small problems of size s.

        Example:
            >>> from thinwire.topology import Complete, Exponential, Ring
            >>> Complete().spectral_gap(16), Exponential().spectral_gap(16)
            (1.0, 1.0)
            >>> round(Ring().spectral_gap(16), 4)  # (2/3) (1 - cos(2 pi / 16))
            0.0507
        """
        if size == 1:
            return 1.0
        # Only the last steps repeat. Those of earlier phases say nothing about the long run.
        steps = self.steps(size)[-self.period(size) :]
        shift = next((s for s in range(1, size) if size % s == 0 and self.is_circulant(size, s)), size)
        product, logs = np.eye(shift), np.zeros(size // shift)
        for step in steps:
            product = self._blocks(step, size, shift) @ product
            product[0] -= product[0].mean(0)  # the mean of all workers, which has the eigenvalue 1
            # Scaled in each step: over a long period, small eigenvalues would be lost in the rounding of larger ones.
            norms = np.linalg.norm(product, axis=(1, 2))
            product = product / np.where(norms > ZERO_MODULUS, norms, np.inf)[:, None, None]
            logs += _log(norms)
        is_symmetric = len(steps) == 1 and self.is_symmetric(size)
        moduli = np.abs(np.linalg.eigvalsh(product) if is_symmetric else np.linalg.eigvals(product)).max(1)
        return float(1.0 - np.exp((logs + _log(moduli)).max() / len(steps)))

    def _blocks(self, step: int, size: int, shift: int) -> np.ndarray:
        """The matrix of a step in which every `shift`-th worker does the same, as blocks along the diagonal.

        A Fourier transform over these workers keeps its eigenvalues; block 0 stands for their mean.

        Returns:
            (size / shift, shift, shift), complex128.
        """
        rows = self._rows(step, size, shift).reshape(shift, size // shift, shift)
        blocks: np.ndarray = np.fft.fft(rows.transpose(1, 0, 2), axis=0)
        return blocks

    def is_directed(self, size: int) -> bool:
        """Whether in some step a worker sends to a peer from which it receives nothing."""
        return any(own.sends.keys() != own.receives.keys() for own in self._everyone(size))

    def is_symmetric(self, size: int) -> bool:
        """Whether `P = P'` at every step: messages go both ways, with equal weights."""
        return all(own.sends == own.receives for own in self._everyone(size))

    def is_circulant(self, size: int, shift: int = 1) -> bool:
        """Whether worker `i + shift` does what worker i does, with peers that are `shift` further on, in every step.

        Example:
            >>> from thinwire.topology import Exponential, RandomPairs
            >>> Exponential().is_circulant(8), RandomPairs().is_circulant(8)
            (True, False)
        """
        # What a worker receives follows from what the others send, so `sends` is enough.
        return all(
            self.neighbours((rank + shift) % size, step, size).sends
            == {(peer + shift) % size: weight for peer, weight in self.neighbours(rank, step, size).sends.items()}
            for step in self.steps(size)
            for rank in range(size)
        )

    def planned(self, size: int) -> Topology:
        """An equivalent topology that is cheaper to simulate, or itself.

        Example:
            >>> from thinwire.topology import RandomPairs
            >>> [RandomPairs().planned(4).neighbours(rank=1, step=step, size=4).sends for step in range(3)]
            [{2: 0.5}, {3: 0.5}, {0: 0.5}]
        """
        return self

    def is_doubly_stochastic(self, size: int) -> bool:
        """Whether every column and every row sums to one at every step: plain gossip then converges to the mean."""
        return all(
            _is_one(own.self_weight, own.sends) and _is_one(own.self_weight, own.receives)
            for own in self._everyone(size)
        )

    def _everyone(self, size: int) -> Iterator[Neighbours]:
        return (self.neighbours(rank, step, size) for step in self.steps(size) for rank in range(size))


def _is_one(self_weight: float, weights: dict[int, float]) -> bool:
    return abs(fsum(weights.values()) + self_weight - 1.0) <= SUM_TOLERANCE


def _log(moduli: np.ndarray) -> np.ndarray:
    """Logarithms; what may be rounding alone counts as 0."""
    logs: np.ndarray = np.log(moduli, where=moduli > ZERO_MODULUS, out=np.full_like(moduli, -np.inf))
    return logs
