"""Blocks of elastic runs: the same batches on any number of workers, each once, and from any checkpoint."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.spawn import run_threads

import thinwire as tw
from thinwire.clock import Clock
from thinwire.lab.train import RunConfig
from thinwire.lab.train.step.blocks import BlockSteps
from thinwire.lab.train.step.steps import Position

CONFIG = RunConfig("digits", batch_size=32, accumulate=3, epochs=2, seed=5)
NUM_BLOCKS = 1258 // 96


def taken(comm, position, place, num_steps=None):
    """This worker's blocks as (epoch of the step, inputs), until the run ends; and the position then."""
    handle = tw.compress_gradients(torch.nn.Linear(1, 1), tw.Mean(), comm=comm)
    blocks, found, done = BlockSteps(CONFIG, CONFIG.data.load(), handle), [], 0
    blocks.load(position, place)
    ahead = blocks.course(0, comm.size)
    while done < min(blocks.course(done, comm.size).num_steps, num_steps or 99):
        step = blocks.take(done, comm, Clock())
        done += 1
        found.append((step.begins_epoch, torch.cat([batch.inputs[0] for batch in step.batches])))
    assert blocks.course(done, comm.size).passes(done) >= 2 or num_steps
    return found, blocks.sampler.state_dict(), blocks.place(done), ahead


def every(results):
    return [one[0][i][1] for i in range(len(results[0][0])) for one in results]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_blocks_are_the_same_on_any_number_of_workers_and_from_a_checkpoint(size):
    alone = every(run_threads(1, taken, None, Position()))
    results = run_threads(size, taken, None, Position())
    together = every(results)
    assert len(alone) == 2 * NUM_BLOCKS and len(together) == size * -(-2 * NUM_BLOCKS // size)
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=False))
    assert len({x.double().sum().item() for x in alone[:NUM_BLOCKS]}) == NUM_BLOCKS
    begins = [epoch for epoch, _ in results[0][0] if epoch is not None]
    assert begins[:2] == [0, 1] and results[0][3].num_steps == len(results[0][0]) == results[0][3].num_scheduled

    _, position, place, _ = run_threads(size, taken, None, Position(), 3)[0]
    assert place == Position(3, *divmod(3 * size, NUM_BLOCKS)[:1], 3 * size % NUM_BLOCKS * 96)
    for start in ((position, Position()), (None, place)):
        rest = every(run_threads(2, taken, *start))
        assert all(torch.equal(a, b) for a, b in zip(alone[3 * size :], rest, strict=False))


def test_data_without_one_block_are_refused():
    def small(comm):
        handle = tw.compress_gradients(torch.nn.Linear(1, 1), tw.Mean(), comm=comm)
        BlockSteps(replace(CONFIG, accumulate=99), CONFIG.data.load(), handle)

    with pytest.raises(ValueError, match="has 3168 examples, and the data have 1258"):
        run_threads(1, small)
