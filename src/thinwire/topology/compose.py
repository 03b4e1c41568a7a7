"""Topologies built from others: one after another (`Phases`), or one between nodes (`Hierarchical`)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..options import require_integer, require_kind
from .base import Neighbours, Topology

Links = set[tuple[int, int]]  # (sender, receiver)


@dataclass(frozen=True, repr=False)
class Phases(Topology):
    """One topology after another, for instance with fewer peers per step later on.

    Each phase counts its steps from its own start, so that a time-varying graph begins with its first step. The last
    phase lasts for ever; `period` and `spectral_gap` are its own.

    Args:
        phases: pairs `(start, topology)`, the starts ascending from 0, in epochs.
        steps_per_epoch: the length of an epoch in steps; 1 => starts are counted in steps.

    Raises ValueError for phases that do not ascend from 0.

    Example:
        >>> from thinwire.topology import Exponential
        >>> schedule = Phases(phases=((0, Exponential(peers=2)), (30, Exponential())), steps_per_epoch=100)
        >>> [len(schedule.neighbours(rank=0, step=step, size=16).sends) for step in (0, 2999, 3000)]
        [2, 2, 1]
    """

    phases: tuple[tuple[int, Topology], ...]
    steps_per_epoch: int = 1

    def __post_init__(self) -> None:
        # Tuples can be hashed, and caches have topologies as their keys.
        object.__setattr__(self, "phases", tuple((start, topology) for start, topology in self.phases))
        for start, topology in self.phases:
            require_integer("Phases: each start", start, 0)
            require_kind("Phases: each phase", topology, Topology, "a topology such as Ring()")
        starts = [start for start, _ in self.phases]
        if not starts or starts[0] != 0 or any(b <= a for a, b in pairwise(starts)):
            raise ValueError(f"Phases: phases must start at 0 and ascend, got the starts {starts}")
        require_integer("Phases: steps_per_epoch", self.steps_per_epoch, 1)

    def _phase(self, step: int) -> tuple[int, Topology]:
        """The first step and the topology of the phase that `step` belongs to."""
        index = bisect_right(self.phases, step // self.steps_per_epoch, key=lambda phase: phase[0]) - 1
        start, topology = self.phases[index]
        return start * self.steps_per_epoch, topology

    def _neighbours(self, rank: int, step: int, size: int) -> Neighbours:
        start, topology = self._phase(step)
        return topology._neighbours(rank, step - start, size)  # unchecked: `validate` has checked all phases

    def _period(self, size: int) -> int:
        return self.phases[-1][1].period(size)

    def _steps(self, size: int) -> Sequence[int]:
        starts = [start * self.steps_per_epoch for start, _ in self.phases]
        ends = [*starts[1:], None]
        steps: list[int] = []
        for start, end, (_, topology) in zip(starts, ends, self.phases, strict=True):
            own = [start + step for step in topology.steps(size)]
            # A phase may be shorter than its period.
            steps += own if end is None else [step for step in own if step < end]
        return steps

    def _validate(self, size: int) -> None:
        for _, topology in self.phases:
            topology.validate(size)

    def is_circulant(self, size: int, shift: int = 1) -> bool:
        return all(topology.is_circulant(size, shift) for _, topology in self.phases)


@dataclass(frozen=True, repr=False)
class Hierarchical(Topology):
    """Workers of one node average exactly, and one worker of each node gossips for it.

    With Q the matrix of `inner` over the nodes and m workers per node, `P = Q (x) (1/m) 11'`: every worker of node
    a gets `sum_b Q[a, b] mean_b`. The nonzero eigenvalues are those of Q, hence so is the spectral gap. The weights
    define the result of a step. An averager that knows the hierarchy computes it with an all-reduce among `members` and
    messages between leaders only. Node a has the ranks `a m .. a m + m - 1`, and the first of them is the leader.

    Args:
        inner: the topology of the nodes, seen by their leaders as ranks `0..W/m - 1`.
        workers_per_node: m.

    Example:
        >>> from thinwire.topology import Ring
        >>> topology = Hierarchical(inner=Ring(), workers_per_node=4)
        >>> topology.leader(rank=6), topology.members(rank=6), topology.num_nodes(size=32)
        (4, range(4, 8), 8)
        >>> round(topology.spectral_gap(size=32), 6) == round(Ring().spectral_gap(size=8), 6)
        True
    """

    inner: Topology
    workers_per_node: int

    def __post_init__(self) -> None:
        require_kind("Hierarchical: inner", self.inner, Topology, "a topology such as Ring()")
        require_integer("Hierarchical: workers_per_node", self.workers_per_node, 1)

    def node(self, rank: int) -> int:
        """The node of a worker, which is its leader's rank in `inner`."""
        return rank // self.workers_per_node

    def leader(self, rank: int) -> int:
        """The worker that gossips for the node of `rank`."""
        return self.node(rank) * self.workers_per_node

    def members(self, rank: int) -> range:
        """The workers of the node of `rank`, itself included."""
        return range(self.leader(rank), self.leader(rank) + self.workers_per_node)

    def num_nodes(self, size: int) -> int:
        """The number of nodes of `size` workers."""
        return -(-size // self.workers_per_node)  # a lone worker is a node of its own

    def _neighbours(self, rank: int, step: int, size: int) -> Neighbours:
        node, nodes = self.node(rank), self.num_nodes(size)
        row = self._spread(self.inner.row(node, step, nodes))
        column = self._spread(self.inner.column(node, step, nodes))
        self_weight = row.pop(rank)
        del column[rank]
        return Neighbours(column, row, self_weight)

    def _spread(self, weights: dict[int, float]) -> dict[int, float]:
        """The weights of nodes, divided evenly among their workers."""
        per_node, share = self.workers_per_node, 1.0 / self.workers_per_node
        return {
            rank: weight * share
            for node, weight in weights.items()
            for rank in range(node * per_node, (node + 1) * per_node)
        }

    def _period(self, size: int) -> int:
        return self.inner.period(self.num_nodes(size))

    def _steps(self, size: int) -> Sequence[int]:
        return self.inner.steps(self.num_nodes(size))

    def _validate(self, size: int) -> None:
        if size % self.workers_per_node:
            raise ValueError(
                f"{self!r} cannot connect {size} workers: they do not fill nodes of {self.workers_per_node}; "
                f"use a multiple of {self.workers_per_node}"
            )
        self.inner.validate(self.num_nodes(size))

    def is_circulant(self, size: int, shift: int = 1) -> bool:
        """Only for whole nodes: their leaders do what no other worker does."""
        nodes, rest = divmod(shift, self.workers_per_node)
        return rest == 0 and self.inner.is_circulant(self.num_nodes(size), nodes)


def links_of(topology: Topology, step: int, size: int) -> tuple[Links, Links]:
    """The messages of a step, and the pairs (leader, member) of workers of one node that average exactly."""
    topology.validate(size)
    if isinstance(topology, Phases):
        start, phase = topology._phase(step)
        return links_of(phase, step - start, size)
    if isinstance(topology, Hierarchical) and size > 1:
        per_node, inner = topology.workers_per_node, links_of(topology.inner, step, topology.num_nodes(size))
        between, within = ({(a * per_node, b * per_node) for a, b in links} for links in inner)  # of leaders
        return between, within | {(leader, rank) for rank in range(size) if (leader := topology.leader(rank)) != rank}
    return {(rank, peer) for rank in range(size) for peer in topology.neighbours(rank, step, size).sends}, set()
