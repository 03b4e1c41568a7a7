"""What workers send: the operations that an engine plays on a network."""

from __future__ import annotations

from dataclasses import dataclass

from ..comm.gloo import goes_straight
from ..comm.ledger import broadcast_tree


@dataclass(frozen=True)
class PeerMessages:
    """One operation of single messages, in the order in which they are sent; bytes by peer."""

    sends: tuple[tuple[int, float], ...]
    receives: tuple[tuple[int, float], ...]

    def shifted(self, by: int, size: int) -> PeerMessages:
        """The same with peers whose rank is `by` higher."""
        sides = [tuple(((peer + by) % size, n) for peer, n in side) for side in (self.sends, self.receives)]
        return PeerMessages(sides[0], sides[1])


@dataclass(frozen=True)
class RingAllReduce:
    """An all-reduce of `num_bytes`: 2 (W-1) steps, in each of which a worker sends num_bytes / W to the next."""

    num_bytes: int


@dataclass(frozen=True)
class Steps:
    """One operation of several steps: each of them sends once all that the one before receives has come."""

    steps: tuple[PeerMessages, ...]

    def shifted(self, by: int, size: int) -> Steps:
        """The same with peers whose rank is `by` higher."""
        return Steps(tuple(step.shifted(by, size) for step in self.steps))


Moves = PeerMessages | RingAllReduce | Steps
"""What one call of a communicator sends and receives."""


def all_reduce(size: int, rank: int, num_bytes: int) -> Moves:
    """The part of worker `rank` in an all-reduce of `num_bytes`, as over Gloo: see `comm/gloo.py`.

    Example:
        >>> all_reduce(size=3, rank=0, num_bytes=300).steps[0].sends
        ((1, 100.0), (2, 100.0))
    """
    others = [(rank + step) % size for step in range(1, size)] if num_bytes else []
    if not goes_straight(num_bytes, size):
        return RingAllReduce(num_bytes)
    whole = num_bytes if size == 2 else num_bytes / size
    messages = tuple((peer, whole) for peer in others)
    step = PeerMessages(messages, messages)
    return step if size == 2 else Steps((step, step))


def broadcast(size: int, rank: int, root: int, num_bytes: int) -> Steps:
    """The part of worker `rank` in a broadcast of `num_bytes` from worker `root`; nothing empty is sent.

    Example:
        >>> received, sent = broadcast(size=4, rank=1, root=0, num_bytes=100).steps
        >>> received.receives, sent.sends
        (((0, 100),), ((3, 100),))
    """
    parents, children = broadcast_tree(size, rank, root) if num_bytes else ([], [])
    receives, sends = (tuple((peer, num_bytes) for peer in peers) for peers in (parents, children))
    return Steps((PeerMessages((), receives), PeerMessages(sends, ())))
