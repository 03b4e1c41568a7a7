"""What workers send: the operations that an engine plays on a network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..comm.ledger import broadcast_tree
from ..comm.sums import Route


@dataclass(frozen=True)
class PeerMessages:
    """One step of an operation: its messages, in the order in which they are sent; bytes by peer."""

    sends: tuple[tuple[int, float], ...]
    receives: tuple[tuple[int, float], ...]

    def renamed(self, peer_of: Callable[[int], int]) -> PeerMessages:
        """The same with another rank for each peer."""
        sides = [tuple((peer_of(peer), n) for peer, n in side) for side in (self.sends, self.receives)]
        return PeerMessages(sides[0], sides[1])


Moves = tuple[PeerMessages, ...]
"""What one call of a communicator sends and receives: each step sends once all that the one before receives has come."""


def all_reduce(route: Route, num_bytes: int) -> Moves:
    """One worker's part in an all-reduce of `num_bytes`: see `comm/sums.py`. Shards are not rounded to whole elements.

    Example:
        >>> all_reduce(Route(0, range(3)), num_bytes=300)[0].sends
        ((1, 100.0), (2, 100.0))
    """
    if num_bytes == 0 or route.size == 1:
        return (PeerMessages((), ()),)
    teams, steps, part = route.teams(num_bytes), list[PeerMessages](), float(num_bytes)
    if not teams:
        return (_both_ways([1 - route.rank], part),)
    for team in teams:
        part /= len(team)
        steps.append(_both_ways(_after(team, route.rank), part))
    return (*steps, *reversed(steps))


def gather_of_sizes(peers: Sequence[int], num_bytes: int) -> Moves:
    """One worker's part in an all-gather of `num_bytes` whose sizes differ: 8 bytes that tell them come first.

    What comes counts as many bytes as what is sent.

    Example:
        >>> [step.sends for step in gather_of_sizes([1], num_bytes=300)]
        [((1, 8),), ((1, 300),)]
    """
    return _both_ways(peers, 8), _both_ways(peers, num_bytes)


def _both_ways(peers: Sequence[int], num_bytes: float) -> PeerMessages:
    messages = tuple((peer, num_bytes) for peer in peers)
    return PeerMessages(messages, messages)


def _after(ranks: Sequence[int], rank: int) -> list[int]:
    """Those that follow on a rank, and then those before it."""
    place = ranks.index(rank)
    return [*ranks[place + 1 :], *ranks[:place]]


def broadcast(size: int, rank: int, root: int, num_bytes: int) -> Moves:
    """The part of worker `rank` in a broadcast of `num_bytes` from worker `root`; nothing empty is sent.

    Example:
        >>> received, sent = broadcast(size=4, rank=1, root=0, num_bytes=100)
        >>> received.receives, sent.sends
        (((0, 100),), ((3, 100),))
    """
    parents, children = broadcast_tree(size, rank, root) if num_bytes else ([], [])
    receives, sends = (tuple((peer, num_bytes) for peer in peers) for peers in (parents, children))
    return PeerMessages((), receives), PeerMessages(sends, ())
