"""The progress of a run with a quorum: its steps are what rounds have merged, in blocks of all workers together.

Workers take as many steps as they are fast. So rows, tests, checkpoints, learning rates and the end of the run follow the
blocks whose changes are committed. All workers merge the same rounds in the same order, and so do the same after each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from ....strategy import LocalUpdates
from ..step.blocks import BlockCourse, BlockSteps


class Merged(NamedTuple):
    """A round that this worker has merged.

    Args:
        done: steps of the run after it.
        ends_epoch: whether it has committed the last block of an epoch.
    """

    done: int
    ends_epoch: bool


class Commits:
    """Counts the steps of the run that this worker has merged.

    Args:
        strategy: with a quorum, after a checkpoint was loaded.
        blocks: of the run, at the same place.
        ahead: the course of the run from there.

    Attributes:
        row: that was begun last and not written: its start, the sums over the workers under way, and its other values.
    """

    def __init__(self, strategy: LocalUpdates, blocks: BlockSteps, ahead: BlockCourse):
        self._strategy, self._sampler, self._size, self._done = strategy, blocks.sampler, ahead.size, ahead.step
        begun = ahead.blocks - ahead.step * ahead.size  # of a step that had begun when the run was saved
        self._before = ahead.blocks - (begun if 0 <= begun < ahead.size else 0)  # else by another number of workers
        self._merged: deque[int] = deque()
        self.row: tuple[dict[str, Any], Callable[[], dict[str, float]], dict[str, Any]] | None = None
        strategy.on_commit(lambda tokens: self._merged.append(self._sampler.num_assigned))

    def count(self, examples: int) -> None:
        """This worker's next step is made from so many."""
        self._strategy.count_tokens(examples)

    def next(self, ahead: BlockCourse) -> Merged | None:
        """The next round that was merged; None if there is no other."""
        if not self._merged:
            return None
        blocks = self._merged.popleft()
        is_last = blocks >= ahead.epochs * ahead.num_blocks
        # The last round may commit less than a whole step.
        done = ahead.num_steps if is_last else self._done + (blocks - self._before) // self._size
        return Merged(done, blocks % ahead.num_blocks == 0)

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
            "dropped_examples": committed.dropped_tokens / self._strategy.strategy.rhythm.fragments,
        }
