"""Which rounds a worker has committed, so that none is lost without an error."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from ..members import Version

LENGTH = 1000
"""Rounds that a worker remembers; older ones are taken to be the same everywhere."""
UNKNOWN = ""


class History:
    """Digests of the last rounds; each depends on all rounds before it.

    Args:
        committed: number of rounds.
        digests: of the last ones, the newest last; `UNKNOWN` for a round that this worker has from a checkpoint.

    Attributes:
        regroupings: how often the workers had changed before the last round.
        num_forgotten: how many rounds this worker had committed when it began to take over another one's state.

    Example:
        >>> ours, theirs = History(), History()
        >>> for place in "ab":
        ...     ours.commit(place), theirs.commit(place)
        (None, None)
        (None, None)
        >>> ours.commit("c"), ours.commit("d"), theirs.commit("e")
        (None, None, None)
        >>> ours.num_lost_in(theirs)
        2
    """

    def __init__(self, committed: int = 0, digests: Sequence[str] = (UNKNOWN,)):
        self.committed, self.digests = committed, list(digests)[-LENGTH:]
        self.regroupings = self.num_forgotten = 0

    @property
    def version(self) -> Version:
        """How new the state is."""
        return Version(self.committed, self.regroupings)

    def commit(self, place: str) -> None:
        """Add a round.

        Args:
            place: name of its connections.
        """
        digest = hashlib.sha256(f"{self.digests[-1]} {place}".encode()).hexdigest()[:16]
        self.committed, self.digests = self.committed + 1, [*self.digests[1 - LENGTH :], digest]

    def forget(self) -> None:
        """Begin again from no rounds."""
        self.num_forgotten = max(self.num_forgotten, self.committed)
        self.committed, self.digests, self.regroupings = 0, [UNKNOWN], 0

    def num_lost_in(self, other: History) -> int:
        """How many of the last rounds here are not among those of another worker, whose state is to replace this one's."""
        for number in range(self.committed, 0, -1):
            mine, theirs = self._digest(number), other._digest(number)
            if number <= other.committed and (UNKNOWN in (mine, theirs) or mine == theirs):
                return self.committed - number
        return self.committed

    def _digest(self, number: int) -> str:
        place = number - self.committed - 1
        return self.digests[place] if -len(self.digests) <= place < 0 else UNKNOWN
