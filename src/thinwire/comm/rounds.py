"""The rounds of a communicator, between which workers may come and go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from .members import Members


class Rounds:
    """Only an elastic communicator has any; for the others, all is one round. Strategies ask `is_elastic`."""

    is_elastic: ClassVar[bool] = False
    """Whether workers come and go between rounds."""

    in_round: bool = True
    """Whether a round is open, so that operations may be called."""

    def form_round(self) -> Members | None:
        """Agree on the workers of the next round. Returns None if they are the same, and nobody needs healing."""
        raise NotImplementedError(f"{type(self).__name__} has one round, which never ends")

    def heal(self, members: Members, save: Callable[[], Any], load: Callable[[Any], None]) -> None:
        """Send the state that `save` returns from `members.source` to the workers that are healed, which `load` it."""
        raise NotImplementedError(f"{type(self).__name__} heals nobody")

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
