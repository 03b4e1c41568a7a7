"""The progress of a run with a quorum: its steps are what rounds have merged, in batches of all workers together.

Workers take as many steps as they are fast. So rows, tests, checkpoints, learning rates and the end of the run follow the
examples whose changes are committed. All workers merge the same rounds in the same order, and so do the same after each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ....strategy import LocalUpdates
from ..step.steps import Course


class Commits:
    """Counts the steps of the run that this worker has merged.

    Args:
        strategy: with a quorum, after a checkpoint was loaded.
        done: steps of the run before.

    Attributes:
        row: that was begun last and not written: its start, the sums over the workers under way, and its other values.
    """

    def __init__(self, strategy: LocalUpdates, done: int):
        self._strategy, self._done, self._examples = strategy, done, strategy.committed_tokens
        self._merged: list[int] = []
        self.row: tuple[dict[str, Any], Callable[[], dict[str, float]], dict[str, Any]] | None = None
        strategy.on_commit(self._merged.append)

    @property
    def own_steps(self) -> int:
        """Steps that this worker has taken, which is its position in its data."""
        return self._strategy.num_steps

    def count(self, examples: int) -> None:
        """This worker's next step is made from so many."""
        self._strategy.count_tokens(examples)

    def merged(self, ahead: Course) -> list[int]:
        """The steps of the run after each round that was merged since the last call."""
        rest = self._examples - self._done * ahead.per_step  # of a step that had begun when the run was saved
        before = self._examples - (rest if 0 <= rest < ahead.per_step else 0)  # else by another number of workers
        found = [self._done + (examples - before) // ahead.per_step for examples in self._merged]
        self._merged.clear()
        return found

    def row_values(self) -> dict[str, float]:
        """The values of a row of metrics about late and dropped changes."""
        committed = self._strategy.committed
        return {
            "committed": committed.rounds,
            "merged_changes": committed.num_merged,
            "late_changes": committed.num_late,
            "staleness": committed.late_rounds / max(1, committed.num_merged),
            "clipped": committed.clipped,
            "dropped_changes": committed.num_dropped,
            "dropped_examples": committed.dropped_tokens / self._strategy.num_fragments,
        }
