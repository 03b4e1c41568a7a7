"""The conformance suite of topologies."""

from __future__ import annotations

from ..topology import Topology
from ..topology.properties import edge_weights
from ..topology.speed import rounds_to_reach_all
from .algorithm import check_algorithm


def check_topology(topology: Topology, sizes: tuple[int, ...] = (1, 2, 4, 8), named: bool = True) -> None:
    """Check that a topology fulfils the contract of `thinwire.topology.base`.

    At each step, j receives from i exactly what i sends to j, with the same weight. No worker is its own peer, all weights
    are positive, and those that use the value of one worker sum to one. After its last listed step the topology repeats with
    its period. What one worker knows reaches all others.

    Args:
        topology: the topology to check.
        sizes: numbers of workers that it can connect.
        named: whether `parse(repr(topology))` must equal it, as for a registered topology.

    Raises:
        AssertionError: the topology breaks the contract.
        ValueError: it does not connect a number of workers of `sizes`.

    Example:
        >>> import thinwire as tw
        >>> from thinwire.testing import check_topology
        >>> check_topology(tw.Exponential(), sizes=(1, 2, 5, 8))
    """
    check_algorithm(topology, Topology, named)
    for size in sizes:
        period = topology.period(size)
        assert type(period) is int and period >= 1, (
            f"{topology}, {size} workers: the period must be 1 or more, got {period!r}"
        )
        steps = topology.steps(size)
        for step in steps:
            _check_step(topology, step, size)
        for step in steps[-period:]:
            for rank in range(size):
                now, later = (topology.neighbours(rank, at, size) for at in (step, step + period))
                assert now == later, f"{topology}, {size} workers: step {step + period} is not step {step} again"
        rounds_to_reach_all(topology, size)


def _check_step(topology: Topology, step: int, size: int) -> None:
    where = f"{topology}, {size} workers"
    try:
        edges = edge_weights(topology, step, size)
    except ValueError as error:  # such as of what is no Neighbours
        raise AssertionError(f"{where}, step {step}: {error}") from None
    for (i, j), (given, taken) in edges.items():
        edge = f"{where}, step {step}, from {i} to {j}"
        assert i != j and 0 <= i < size and 0 <= j < size, f"{edge}: a peer must be another worker"
        assert given == taken, f"{edge}: the weight is {given} for the sender and {taken} for the receiver"
        assert given is not None and given > 0, f"{edge}: the weight must be positive, got {given}"
    for rank in range(size):
        own = topology.neighbours(rank, step, size)
        total = own.self_weight + sum(own.sends.values())
        assert own.self_weight > 0, f"{where}, step {step}: rank {rank} must keep a part of its own value"
        assert abs(total - 1) < 1e-9, f"{where}, step {step}: the value of rank {rank} is used {total} times, not once"
