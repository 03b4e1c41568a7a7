"""The rounds of a communicator, between which workers may come and go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from .members import Members


class Rounds:
    """Only an elastic communicator has any; for the others, all is one round. Strategies ask `is_elastic`."""

    is_elastic: ClassVar[bool] = False
    """Whether workers come and go between rounds."""

    num_skipped: int = 0
    """How many steps of the open round this worker leaves out, because it has joined after the others took them.

    From the begin of the round until its next step, or the next `take` of a sampler; 0 at other times.
    """

    replica: Any = None
    """The mesh of the processes that together are this worker, where the model is sharded."""

    in_round: bool = True
    """Whether a round is open, so that operations may be called."""

    def form_round(self) -> Members | None:
        """Agree on the workers of the next round. Returns None if they are the same, and nobody needs healing."""
        raise NotImplementedError(f"{type(self).__name__} has one round, which never ends")

    def share(
        self,
        name: str,
        save: Callable[[], Any],
        load: Callable[[Any], None],
        is_common: bool = True,
        is_late: bool = False,
    ) -> Callable[[], None]:
        """Let a worker that joins get a part of the state from live ones, until the function that is returned is called.

        Args:
            name: of the part, the same on all workers.
            save: returns tensors and plain values; called on live workers when a round begins that a worker joins.
            load: restores them; called on the worker that joins, in the order in which parts were shared.
            is_common: whether it is the same on all workers when a round begins: then it is compared, and comes from several
                workers. Otherwise the joiner takes over that of one of them.
            is_late: whether it may be loaded after the round has begun, while the others train. If it is common too, what
                `save` returns is read when the joiner asks for it, so it must not change within the round.
        """
        raise NotImplementedError(f"{type(self).__name__} has the same workers all the time")

    def heal(self, members: Members) -> None:
        """Load what the workers that are healed need to begin the round; the others offer their state."""
        raise NotImplementedError(f"{type(self).__name__} heals nobody")

    def finish_healing(self) -> int:
        """After `open_round`: load the rest. Returns how many steps of the round a healed worker has missed."""
        raise NotImplementedError(f"{type(self).__name__} heals nobody")

    def stepped(self) -> None:
        """Say that this worker has taken a step within a round, so that one that joins knows how far the others are."""

    def open_round(self, members: Members | None) -> None:
        """Begin the round that `form_round` formed. If its workers have changed, all wait until all have regrouped.

        Raises:
            CommunicationError: a worker died meanwhile; another round must be formed.
        """
        raise NotImplementedError(f"{type(self).__name__} has one round, which never ends")

    def progressed(self) -> None:
        """Say that this worker makes progress in a round, as by a forward pass; one that makes none counts as stuck."""

    def close_round(self, success: bool, norm: float = 0.0) -> bool:
        """End the round. Returns whether all workers of the round commit it: all of them had success, and know it.

        Args:
            success: whether this worker has all results.
            norm: of this worker's own memory, for the report of what is lost with it.
        """
        raise NotImplementedError(f"{type(self).__name__} has one round, which never ends")
