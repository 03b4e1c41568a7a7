"""The steps of a run whose data are assigned as it goes: every block of an epoch is committed once, though workers come and go.

A block is the batches of one worker's step. An `ElasticSampler` assigns one to each worker of a step, in an order that the
seed and the epoch choose. The content of a block follows from the seed alone, whichever worker has it. The blocks of a worker
that dies before its round is committed are assigned again, first. An epoch ends with the step that commits the last of its
blocks. It has as many blocks as the data fill; the examples that are left over differ from epoch to epoch.

With a quorum, workers take blocks at their own speed. A step of the run is then as many committed blocks as there are workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ....algorithm import require
from ....clock import Clock
from ....comm import Communicator
from ....sampler import Block, ElasticSampler
from ....strategy import AveragerAttachment
from ..config import RunConfig
from ..data import Batch, Dataset, shard
from .steps import Position, Step


@dataclass(frozen=True)
class BlockCourse:
    """The steps of a run from now on, if the workers stay.

    Args:
        step: number of steps so far.
        blocks: assigned so far, since the start of the run, without those that were given back; with a quorum, committed.
        num_blocks: in an epoch.
        size: number of workers.
        epochs: of the run.
        limit: of steps; None if there is none.
    """

    step: int
    blocks: int
    num_blocks: int
    size: int
    epochs: int
    limit: int | None

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        left = max(0, -(-(self.epochs * self.num_blocks - self.blocks) // self.size))
        return min(self.step + left, self.limit or self.step + left)

    @property
    def num_scheduled(self) -> int:
        """Steps of a whole run on this number of workers; learning rates follow the part of these that is done."""
        whole = -(-self.epochs * self.num_blocks // self.size)
        return min(whole, self.limit or whole)

    def passes(self, step: int) -> float:
        """Passes over the data after `step` steps, with a fraction."""
        return (self.blocks + (step - self.step) * self.size) / self.num_blocks

    def scheduled(self, step: int) -> int:
        """How many of the `num_scheduled` steps are done after `step` steps."""
        return max(0, self.num_scheduled - (self.num_steps - step))


class BlockSteps:
    """Assigns and loads the blocks of one worker of an elastic run or one with a quorum; all workers construct it together.

    Args:
        config, data: of the run.
        handle: the strategy at work.

    Attributes:
        sampler: assigns the blocks.
        weight: of this worker's last step, see `ElasticSampler`.
    """

    def __init__(self, config: RunConfig, data: Dataset, handle: AveragerAttachment):
        self._config, self._data = config, data
        self._examples = config.batch_size * config.accumulate  # of a block
        require(
            data.num_examples >= self._examples,
            f"a step of one worker has {self._examples} examples, and the data have {data.num_examples}; choose a lower "
            "batch_size or accumulate",
        )
        self._has_quorum = handle.strategy.counts_commits
        per_step = None if self._has_quorum else 1  # until `take` knows the workers
        self.sampler = ElasticSampler(data.num_examples // self._examples, handle, per_step, seed=config.seed)
        self.weight, self._epoch = 1.0, 0
        self._expected: deque[Block] = deque()
        self._batches: Iterator[Batch] = iter(())
        self._plan: tuple[int, Any] = (-1, None)  # of an epoch

    def load(self, position: dict[str, Any] | None, place: Position) -> None:
        """Go on from a checkpoint: from the sampler's position, or from the place of a run without blocks."""
        num_blocks = self.sampler.num_blocks
        assigned = place.epoch * num_blocks + min(place.examples // self._examples, num_blocks)
        began: dict[str, Any] = {"next": assigned, "returned": [], "leases": {}, "per_step": 1, "own": 0}
        self.sampler.load_state_dict(position or began)

    def course(self, step: int, size: int) -> BlockCourse:
        """The course of the run after `step` steps, on so many workers."""
        self._epoch = max(self._epoch, self.sampler.epoch)
        config, num_blocks = self._config, self.sampler.num_blocks
        return BlockCourse(step, self.sampler.num_assigned, num_blocks, size, config.epochs, config.max_steps)

    def place(self, step: int) -> Position:
        """The place in the run after `step` steps, for a checkpoint that goes on with a fixed number of workers."""
        epoch, blocks = divmod(self.sampler.num_assigned, self.sampler.num_blocks)
        return Position(step, epoch, blocks * self._examples)

    def take(self, step: int, comm: Communicator, clock: Clock) -> Step | None:
        """The step after `step` steps, once the workers of its round are known; None if no block is left for this worker."""
        if self._has_quorum:
            blocks = self.sampler.take()
            with clock("data"):
                return Step(step + 1, self.passes, None, False, self._load(*blocks)) if blocks else None
        self.sampler.per_step = comm.size
        before, num_blocks = self.sampler.num_assigned, self.sampler.num_blocks
        next_epoch = -(-before // num_blocks)
        (block,) = self.sampler.take()
        self.weight = self.sampler.weight
        begins = next_epoch if next_epoch * num_blocks < before + comm.size and self.weight else None
        with clock("data"):
            batches = self._load(block)
        return Step(step + 1, self.course(step, comm.size).passes(step), begins, False, batches)

    @property
    def passes(self) -> float:
        """Passes over the data so far, with a fraction."""
        return self.sampler.num_assigned / self.sampler.num_blocks

    def epoch_has_ended(self) -> bool:
        """Whether the last step has committed what was left of an epoch; asked once after each step, or when all have met."""
        before, self._epoch = self._epoch, max(self._epoch, self.sampler.epoch)
        return self._epoch > before

    def _load(self, block: Block) -> list[Batch]:
        if not self._expected or self._expected.popleft() != block:  # other workers, or blocks were given back
            self._expected = deque([block, *self.sampler.upcoming(block.epoch)])
            if self._plan[0] != block.epoch:
                order = shard(self._data.num_examples, 0, 1, self._config.seed, block.epoch)
                self._plan = (block.epoch, self._data.plan(order, self._config.batch_size))
            plan, each = self._plan[1], self._config.accumulate
            numbers = [each * one.number + i for one in self._expected for i in range(each)]
            self._batches = self._data.batches(plan, self._config.seed, 0, block.epoch, numbers)
            self._expected.popleft()
        return list(islice(self._batches, self._config.accumulate))
