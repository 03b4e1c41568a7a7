"""The steps of a run, and this worker's batches in each step.

Everything here is a pure function of the configuration and the step's number. So a run that is resumed after any step
continues with exactly the next batch.

Other workers. The number of workers may change between two steps. The run then goes on from a `Position`: the examples of the
epoch that no worker has seen yet are split over the new workers. (Split unevenly or in order, workers go on at the same
fraction of their new shares.) Steps are counted on; there are as many as the rest of the epochs has batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from ....algorithm import require
from ....clock import Clock
from ....comm import Communicator
from ..config import RunConfig
from ..data import Batch, Dataset, contiguous_shard, num_batches, shard, uneven_shard


class Step(NamedTuple):
    """One optimizer step and this worker's batches in it.

    Args:
        number: number of the step, 1 for the first.
        epoch: passes over the data after this step, with a fraction.
        begins_epoch: number of the epoch, from 0, if this is its first step; else None.
        ends_epoch: whether it is the last step of the epoch or of the run.
        batches: `config.accumulate` batches.
    """

    number: int
    epoch: float
    begins_epoch: int | None
    ends_epoch: bool
    batches: list[Batch]


class Position(NamedTuple):
    """A place in the course of a run.

    Args:
        step: number of steps so far.
        epoch: number of whole epochs so far.
        examples: examples of the epoch that all workers together have seen.
    """

    step: int = 0
    epoch: int = 0
    examples: int = 0


START = Position()


@dataclass(frozen=True)
class Course:
    """The steps of a run from a place on, on a fixed number of workers.

    Args:
        origin: where this number of workers began.
        per_epoch: steps of a whole epoch.
        rest: steps in what is left of the epoch at the origin.
        per_step: examples of a step on all workers.
        num_steps: steps of the whole run, those before the origin included.
        num_scheduled: steps of a whole run on this number of workers; learning rates follow the part of these that is done.
    """

    origin: Position
    per_epoch: int
    rest: int
    per_step: int
    num_steps: int
    num_scheduled: int

    def epoch_of(self, step: int) -> tuple[int, int]:
        """The epoch of the step after `step` steps, and how many steps of this course it has had before that."""
        later = step - self.origin.step - self.rest
        if later < 0:
            return self.origin.epoch, later + self.rest
        epoch, position = divmod(later, self.per_epoch)
        return self.origin.epoch + 1 + epoch, position

    def passes(self, step: int) -> float:
        """Passes over the data after `step` steps, with a fraction."""
        later = step - self.origin.step - self.rest
        return (self.origin.epoch + 1) + later / self.per_epoch if self.origin.step else step / self.per_epoch

    def place(self, step: int) -> Position:
        """The place after `step` steps."""
        epoch, position = self.epoch_of(step)
        first = self.origin.examples if epoch == self.origin.epoch else 0
        return Position(step, epoch, first + position * self.per_step)

    def scheduled(self, step: int) -> int:
        """How many of the `num_scheduled` steps are done after `step` steps."""
        return max(0, self.num_scheduled - (self.num_steps - step))


def course(config: RunConfig, data: Dataset, size: int, origin: Position = START) -> Course:
    """The course of the run on `size` workers from a place on.

    Raises:
        ValueError: a worker's share is too small for one step, or the data can't be split as the configuration wants.
    """
    check_split(config, data)
    batches = num_batches(data.num_examples, size, config.batch_size)
    require(
        batches >= config.accumulate,
        f"accumulate {config.accumulate} needs as many batches, but a worker's share has {batches}; choose a lower one",
    )
    per_epoch, per_step = batches // config.accumulate, size * config.batch_size * config.accumulate
    left = data.num_examples - origin.examples
    # Of a begun epoch, only the examples that no worker has seen are left.
    rest = per_epoch if origin.examples == 0 else left // size // config.batch_size // config.accumulate
    num_steps = origin.step + max(0, rest + (config.epochs - origin.epoch - 1) * per_epoch)
    whole, limit = config.epochs * per_epoch, config.max_steps or max(num_steps, config.epochs * per_epoch)
    return Course(origin, per_epoch, rest, per_step, min(num_steps, limit), min(whole, limit))


def steps(
    config: RunConfig,
    data: Dataset,
    comm: Communicator,
    ahead: Course,
    done: int,
    clock: Clock,
) -> Iterator[Step]:
    """Yield the steps after the first `done`; the last one ends an epoch, even a partial one.

    Args:
        config, data: of the run.
        comm: says which worker this is.
        ahead: the course of the run on these workers.
        done: number of steps already taken.
        clock: times the loading of batches as phase "data".
    """
    origin = ahead.origin
    batches: Iterator[Batch] = iter(())
    for i in range(done, ahead.num_steps):
        epoch, position = ahead.epoch_of(i)
        is_rest = epoch == origin.epoch
        with clock("data"):
            # At the start of an epoch, and where a resumed run goes on within one.
            if position == 0 or i == done:
                share = share_of(config, data, comm, epoch, origin.examples if is_rest else 0)
                length = (ahead.rest if is_rest else ahead.per_epoch) * config.accumulate
                # All workers take equally many steps, so batches that fill no step are left out.
                plan = data.plan(share, config.batch_size)[:length]
                batches = data.batches(
                    plan, config.seed, comm.rank, epoch, range(position * config.accumulate, len(plan))
                )
            taken = list(islice(batches, config.accumulate))
        begins = position == 0 and not (is_rest and origin.examples)
        ends = i + 1 == ahead.num_steps or ahead.epoch_of(i + 1)[0] > epoch
        yield Step(i + 1, ahead.passes(i + 1), epoch if begins else None, ends, taken)


def check_split(config: RunConfig, data: Dataset) -> None:
    """Check that the data can be split as the configuration asks.

    Raises:
        ValueError: it cannot.
    """
    by_class = config.split == "by-class"
    require(
        not (data.in_order and (by_class or config.shuffled)),
        "text that is read in order has no split by-class and nothing shuffled; leave both out, or in_order",
    )
    require(data.labels is not None or not by_class, "split by-class needs examples with a class; choose by-position")


def share_of(config: RunConfig, data: Dataset, comm: Communicator, epoch: int, first: int) -> Tensor:
    """Indices of this worker's examples in an epoch, in the order of use.

    Args:
        config, data: of the run.
        comm: says which worker this is.
        epoch: number of the epoch.
        first: how many of the epoch's examples the workers have seen before; the others are split.
    """
    if config.split == "even" and not data.in_order:
        return shard(data.num_examples, comm.rank, comm.size, config.seed, epoch, first)
    if data.in_order:
        share = contiguous_shard(data.num_examples, comm.rank, comm.size)
    else:
        keys = data.labels if config.split == "by-class" else torch.arange(data.num_examples)
        assert keys is not None, "`check_split` demands labels"
        share = uneven_shard(keys, comm.rank, comm.size, config.seed, epoch, config.shuffled)
    # The new share begins at the fraction of the epoch that was seen before.
    return share[len(share) - (data.num_examples - first) // comm.size :]
