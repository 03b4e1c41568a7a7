"""Checks of a gossip averager's configuration and topology."""

from __future__ import annotations

from math import fsum, isclose
from typing import TYPE_CHECKING

from ...algorithm import require
from ...codec import Codec
from ...options import require_kind, require_number
from ...topology.properties import edge_weights
from ...topology.speed import difference_rates
from ...topology.undirected import cut_off

if TYPE_CHECKING:
    from .base import GossipAverager


def check_codec(averager: GossipAverager, codec: Codec) -> None:
    """Raise ValueError unless neighbours know the size of a payload before they receive it."""
    name = type(averager).__name__
    require_kind(f"{name}: codec", codec, Codec, "a codec such as TopK(0.01)")
    require(
        codec.traits.agreement is None and codec.traits.adaptive is None,
        f"{name}: {codec} needs all workers to agree on some numbers, and gossip asks neighbours only; use Mean",
    )
    require(
        not codec.traits.shared_key,
        f"{name}: {codec} needs one key for all workers, and gossip gives each worker keys of its own; leave shared=True out",
    )
    require(
        codec.traits.fixed_size,
        f"{name}: payloads of {codec} vary in size, and a neighbour must know the size before it receives; use a codec "
        "of fixed size such as TopK or QSGD",
    )


def check_graph(averager: GossipAverager, size: int) -> None:
    """Raise ValueError unless each worker receives what others send to it, and the steps that repeat connect all workers.

    Otherwise a worker would wait for ever, or each part of the graph would agree on a mean of its own.
    """
    topology, edges = averager.topology, set[tuple[int, int]]()
    steps, period = topology.steps(size), topology.period(size)
    for at, step in enumerate(steps):
        for (i, j), (given, taken) in edge_weights(topology, step, size).items():
            require(
                given is not None and taken is not None and isclose(given, taken),
                f"{averager}: from rank {i} to rank {j} of {size} workers at step {step}, the weight is {given} for the "
                f"sender and {taken} for the receiver; see thinwire.testing.check_topology",
            )
            if at >= len(steps) - period:
                edges.add((i, j))
    alone = cut_off(edges, size)
    require(
        not alone,
        f"{averager}: {topology} does not connect {size} workers: no path joins rank 0 both ways with the ranks {alone[:8]}; "
        "add edges between them",
    )


def check_doubly_stochastic(averager: GossipAverager, size: int) -> None:
    """Raise ValueError unless plain mixing keeps the mean."""
    require(
        averager.topology.is_doubly_stochastic(size),
        f"{averager}: the mixing matrix of {size} workers is not doubly stochastic, so the mean would not be kept; "
        "use weights='metropolis', a regular graph, or PushSum",
    )


def check_column_stochastic(averager: GossipAverager, size: int) -> None:
    """Raise ValueError unless the weights of each worker's value add up to one, as those of every valid topology do."""
    topology = averager.topology
    for step in topology.steps(size):
        for rank in range(size):
            total = fsum(topology.column(rank, step, size).values())
            require(
                isclose(total, 1.0),
                f"{averager}: at step {step} the weights of rank {rank} of {size} workers add up to {total:.6g}, not to 1, so "
                "the mean would not be kept; see thinwire.testing.check_topology",
            )


def check_fixed_undirected(averager: GossipAverager, size: int) -> None:
    """Raise ValueError unless the graph is the same at every step and its mixing matrix is symmetric."""
    topology = averager.topology
    require(
        len(topology.steps(size)) == 1,
        f"{averager}: the two ends of an edge remember each other, so the graph must not change with time, and "
        f"{topology} repeats every {topology.period(size)} steps; use a static graph such as Ring(), or Mix or PushSum",
    )
    require(
        topology.is_symmetric(size),
        f"{averager}: messages go both ways with equal weights, and {topology} is not symmetric for {size} workers; "
        "use an undirected graph such as Ring() (weights='metropolis'), or PushSum",
    )
    check_doubly_stochastic(averager, size)


def check_step_size(averager: GossipAverager, value: object, or_none: bool = False) -> None:
    """Raise ValueError unless a step size is a positive number."""
    name = f"{type(averager).__name__}: step_size"
    require_number(name, value, above=0, or_none=or_none, hint="; lower is more stable")


def check_stable(averager: GossipAverager, step_size: float | None, size: int) -> None:
    """Raise ValueError if rounds with this step size diverge on this graph even without compression.

    None is fitted, and stable. Up to 1 they are stable on every graph. Only a static undirected graph has one bound above that.
    """
    topology = averager.topology
    if step_size is None or step_size <= 1 or size == 1:
        return
    if len(topology.steps(size)) > 1 or not topology.is_symmetric(size):
        return
    slowest, fastest = difference_rates(topology, size)
    require(
        step_size * fastest < 2,
        f"{averager}: step_size must be below {2 / fastest:.4g} on {topology} with {size} workers, where gossip diverges, "
        f"got {step_size}; without compression {2 / (slowest + fastest):.4g} is the fastest",
    )
