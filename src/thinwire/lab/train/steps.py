"""The steps of a run, and this worker's batches in each step.

Everything here is a pure function of the configuration and the step's number. So a run that is resumed after any step
continues with exactly the next batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from ...algorithm import require
from ...clock import Clock
from ...comm import Communicator
from .config import RunConfig
from .data import Batch, Dataset, contiguous_shard, num_batches, shard, uneven_shard


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


def count_steps(config: RunConfig, data: Dataset, size: int) -> tuple[int, int]:
    """Count the steps of an epoch and of the whole run on `size` workers.

    Raises:
        ValueError: a worker's share is too small for one step, or the data can't be split as the configuration wants.
    """
    check_split(config, data)
    batches = num_batches(data.num_examples, size, config.batch_size)
    require(
        batches >= config.accumulate,
        f"accumulate {config.accumulate} needs as many batches, but a worker's share has {batches}; choose a lower one",
    )
    per_epoch = batches // config.accumulate
    num_steps = config.epochs * per_epoch
    return per_epoch, min(num_steps, config.max_steps or num_steps)


def steps(
    config: RunConfig, data: Dataset, comm: Communicator, done: int = 0, clock: Clock | None = None
) -> Iterator[Step]:
    """Yield the steps after the first `done`; the last one ends an epoch, even a partial one.

    Args:
        config, data: of the run.
        comm: says which worker this is.
        done: number of steps already taken.
        clock: times the loading of batches as phase "data".
    """
    per_epoch, num_steps = count_steps(config, data, comm.size)
    clock = clock or Clock()
    batches: Iterator[Batch] = iter(())
    for i in range(done, num_steps):
        epoch, position = divmod(i, per_epoch)
        with clock("data"):
            if position == 0 or i == done:
                plan = data.plan(share_of(config, data, comm, epoch), config.batch_size)[
                    : per_epoch * config.accumulate
                ]
                batches = data.batches(plan, config.seed, comm.rank, epoch, first=position * config.accumulate)
            taken = list(islice(batches, config.accumulate))
        ends_epoch = i + 1 in ((epoch + 1) * per_epoch, num_steps)
        yield Step(i + 1, (i + 1) / per_epoch, None if position else epoch, ends_epoch, taken)


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


def share_of(config: RunConfig, data: Dataset, comm: Communicator, epoch: int) -> Tensor:
    """Indices of this worker's examples in an epoch, in the order of use."""
    if data.in_order:
        return contiguous_shard(data.num_examples, comm.rank, comm.size)
    if config.split == "even":
        return shard(data.num_examples, comm.rank, comm.size, config.seed, epoch)
    keys = data.labels if config.split == "by-class" else torch.arange(data.num_examples)
    assert keys is not None, "`check_split` demands labels"
    return uneven_shard(keys, comm.rank, comm.size, config.seed, epoch, config.shuffled)
