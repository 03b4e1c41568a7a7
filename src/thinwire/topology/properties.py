"""Facts about a topology of a given size, as lines to print, and the weights of its edges."""

from __future__ import annotations

from collections import Counter
from math import inf, log

from .base import Topology
from .compose import links_of


def edge_weights(topology: Topology, step: int, size: int) -> dict[tuple[int, int], tuple[float | None, float | None]]:
    """The weight of each edge `(sender, receiver)` as the sender has it and as the receiver has it; None if one lacks the edge.

    Example:
        >>> from thinwire.topology import Ring
        >>> edge_weights(Ring(), step=0, size=2)
        {(0, 1): (0.5, 0.5), (1, 0): (0.5, 0.5)}
    """
    everyone = [topology.neighbours(rank, step, size) for rank in range(size)]
    sent = {(i, j): weight for i, own in enumerate(everyone) for j, weight in own.sends.items()}
    received = {(i, j): weight for j, own in enumerate(everyone) for i, weight in own.receives.items()}
    return {edge: (sent.get(edge), received.get(edge)) for edge in sorted(sent.keys() | received.keys())}


def describe(topology: Topology, size: int) -> list[tuple[str, str]]:
    """The properties of a topology as pairs (name, value), in words.

    Peers are those that a worker sends to in a step; in a hierarchy, those that it sends to as the leader of its node.
    Raises ValueError where the topology cannot connect `size` workers.

    Example:
        >>> from thinwire.topology import Exponential
        >>> for name, value in describe(Exponential(), size=16):
        ...     print(f"{name:20} {value}")
        topology             Exponential()
        workers              16
        graph                directed, repeats every 4 steps
        peers per step       1
        messages per step    16
        mixing matrix        doubly stochastic, not symmetric
        spectral gap         1
        agreement            exact after 4 steps
    """
    num_peers = [count for step in topology.steps(size) for count in _num_peers(topology, step, size)]
    low, high, period, gap = min(num_peers), max(num_peers), topology.period(size), topology.spectral_gap(size)
    time = "static" if period == 1 else f"repeats every {period} steps"
    sums = "doubly stochastic" if topology.is_doubly_stochastic(size) else "column-stochastic (use push-sum)"
    return [
        ("topology", repr(topology)),
        ("workers", str(size)),
        ("graph", f"{'directed' if topology.is_directed(size) else 'undirected'}, {time}"),
        ("peers per step", str(low) if low == high else f"{low} to {high}"),
        ("messages per step", f"{sum(num_peers) * size / len(num_peers):g}"),
        ("mixing matrix", f"{sums}, {'symmetric' if topology.is_symmetric(size) else 'not symmetric'}"),
        ("spectral gap", f"{gap:.6g}"),
        ("agreement", _agreement(gap, period)),
    ]


def _num_peers(topology: Topology, step: int, size: int) -> list[int]:
    senders = Counter(sender for sender, _ in links_of(topology, step, size)[0])
    return [senders[rank] for rank in range(size)]


def _agreement(gap: float, period: int) -> str:
    """How fast workers agree: in the long run the disagreement shrinks by `1 - gap` a step."""
    if gap >= 1.0:
        return f"exact after {period} step{'s' * (period > 1)}"
    return f"ten times closer every {log(10.0) / -log(1.0 - gap) if gap > 0.0 else inf:.3g} steps"
