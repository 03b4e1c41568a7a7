"""Checks of a gossip averager's configuration and topology."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..algorithm import require
from ..codec import Codec

if TYPE_CHECKING:
    from .gossip_base import Gossip


def check_codec(averager: Gossip, codec: object) -> None:
    """Raise ValueError unless neighbours know the size of a payload before they receive it."""
    name = type(averager).__name__
    if not isinstance(codec, Codec):
        raise ValueError(f"{name}: codec must be a codec such as TopK(0.01), got {codec!r}")
    require(
        codec.agreement is None and codec.adaptive_part is None,
        f"{name}: {codec} needs all workers to agree on some numbers, and gossip asks neighbours only; use Mean",
    )
    require(
        codec.fixed_size,
        f"{name}: payloads of {codec} vary in size, and a neighbour must know the size before it receives; use a codec "
        "of fixed size such as TopK or QSGD",
    )


def check_doubly_stochastic(averager: Gossip, size: int) -> None:
    """Raise ValueError unless plain mixing keeps the mean."""
    require(
        averager.topology.is_doubly_stochastic(size),
        f"{averager}: the mixing matrix of {size} workers is not doubly stochastic, so the mean would not be kept; "
        "use weights='metropolis', a regular graph, or PushSum",
    )


def check_fixed_undirected(averager: Gossip, size: int) -> None:
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


def check_number(averager: Gossip, name: str, value: object) -> None:
    """Raise ValueError unless a step size is a number above 0 and at most 1."""
    require(
        isinstance(value, (int, float)) and 0 < value <= 1,
        f"{type(averager).__name__}: {name} must be above 0 and at most 1, got {value!r}; lower is more stable",
    )
