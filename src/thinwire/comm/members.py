"""Who takes part in the rounds of an elastic communicator, and what became of those that no longer do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Version(NamedTuple):
    """How new a worker's state is: committed rounds count first, then how often it has regrouped."""

    committed: int = 0
    regroupings: int = 0


class Members(NamedTuple):
    """The workers of a round.

    Args:
        numbers: each worker's own number, which it keeps through all rounds, by rank.
        before: for each rank, the rank of this worker in the last round; None if it is new or was healed.
        version: of the newest state.
        source: the first rank that the others are healed from; None if nobody is healed.
        healed: the ranks that are healed.
        sources: all ranks that have the newest state, and can save it.
    """

    numbers: tuple[int, ...]
    before: tuple[int | None, ...]
    version: Version = Version()
    source: int | None = None
    healed: tuple[int, ...] = ()
    sources: tuple[int, ...] = ()


class LeftOut(RuntimeError):
    """The others continue without this worker, because of its own failure; it may be restarted."""


class LostRounds(ValueError):
    """Healing would lose rounds that this worker has committed."""


class Diverged(ValueError):
    """What workers have in common differs, and no majority says which is right."""


class Loss(NamedTuple):
    """What was lost when a worker left, or when one fell behind and was healed.

    Args:
        round: number of rounds committed by then.
        worker: its own number.
        norm: norm of its own memory when it last voted, before that round changed it; None if it never voted.
    """

    round: int
    worker: int
    norm: float | None


@dataclass
class RoundCounts:
    """What became of the rounds so far.

    Attributes:
        committed: rounds that all of their workers committed.
        aborted: rounds that were given up.
        healings: how often this worker was healed, the start of a run not counted.
        losses: what died with workers, as this worker knows it.
    """

    committed: int = 0
    aborted: int = 0
    healings: int = 0
    losses: list[Loss] = field(default_factory=list)


class Shared(NamedTuple):
    """State that a joining worker gets from a live one.

    Args:
        save, load: how to save and to load it.
        is_common: whether it is the same on all workers.
        is_late: whether a worker may load it after its first round has begun.
    """

    save: Callable[[], Any]
    load: Callable[[Any], None]
    is_common: bool = True
    is_late: bool = False
