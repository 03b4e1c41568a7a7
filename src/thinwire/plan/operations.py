"""What workers send: the operations that an engine plays on a network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..comm.ledger import broadcast_tree


@dataclass(frozen=True)
class PeerMessages:
    """One operation of single messages, in the order in which they are sent; bytes by peer."""

    sends: tuple[tuple[int, int], ...]
    receives: tuple[tuple[int, int], ...]

    def renamed(self, peer_of: Callable[[int], int]) -> PeerMessages:
        """The same with another rank for each peer."""
        sides = [tuple((peer_of(peer), n) for peer, n in side) for side in (self.sends, self.receives)]
        return PeerMessages(sides[0], sides[1])


@dataclass(frozen=True)
class RingAllReduce:
    """An all-reduce of `num_bytes`: 2 (W-1) steps, in each of which a worker sends num_bytes / W to the next."""

    num_bytes: int


@dataclass(frozen=True)
class Forward:
    """One worker's part of a broadcast: it receives the message, if it is not the first, and then sends it on."""

    receives: tuple[tuple[int, int], ...]
    sends: tuple[tuple[int, int], ...]

    @classmethod
    def broadcast(cls, size: int, rank: int, root: int, num_bytes: int) -> Forward:
        """The part of worker `rank` in a broadcast of `num_bytes` from worker `root`; nothing empty is sent.

        Example:
            >>> Forward.broadcast(size=4, rank=1, root=0, num_bytes=100)
            Forward(receives=((0, 100),), sends=((3, 100),))
        """
        parents, children = broadcast_tree(size, rank, root) if num_bytes else ([], [])
        return cls(*(tuple((peer, num_bytes) for peer in peers) for peers in (parents, children)))


Moves = PeerMessages | RingAllReduce | Forward
"""What one call of a communicator sends and receives."""
