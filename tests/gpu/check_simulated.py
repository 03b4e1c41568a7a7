"""Strategies of random parts on the simulated GPU: no work runs ahead of what it needs, and results are those of the CPU.

PYTHONPATH=tests .venv/bin/python -m pytest -p helpers.simulated_gpu tests/gpu/check_simulated.py
"""

from __future__ import annotations

import copy
import re

import pytest
import torch
from helpers.averagers import GOSSIP
from helpers.simulated_gpu import SIMULATED
from hypothesis import given, settings
from hypothesis import strategies as st
from strategy.test_compositions import Model, Refused, strategies, trained
from torch import nn

import thinwire as tw

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
BY_DEVICE = re.compile(
    "PowerSGD|Dion|PowerGossip|Choco"
)  # products of matrices, and a norm, are summed in another order
MODEL = Model()


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Its gradients are sums of two numbers, which have the same bits everywhere."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    ours = [p for p in model.parameters() if p.requires_grad]
    return sum((p * torch.randn(p.shape, generator=generator).to(p.device)).sum() + (p * p).sum() / 2 for p in ours)


def on(device, saved=None):
    """What `trained` takes for training on a device, from saved states on."""
    return saved and [state for _, state, _ in saved], lambda: copy.deepcopy(MODEL).to(device), loss_of


def assert_equal(found, expected, tolerance=0.0):
    for (ours, *_), (theirs, *_) in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, check_device=False)


@settings(max_examples=100)
@given(parts=st.data(), workers=st.sampled_from([1, 2, 4]), momentum=st.sampled_from([0.0, 0.9]))
def test_random_compositions(parts, workers, momentum):
    try:
        strategy = parts.draw(strategies())
    except Refused:
        return
    world = tw.LocalWorld(workers)
    try:
        expected = world.run(trained, strategy, momentum, *on(CPU))
    except ValueError:
        with pytest.raises(ValueError):
            world.run(trained, strategy, momentum, *on(GPU))
        return
    found = world.run(trained, strategy, momentum, *on(GPU))
    assert_equal(found, expected, tolerance=1e-3 if BY_DEVICE.search(repr(strategy)) else 0.0)
    assert_equal(world.run(trained, strategy, momentum, *on(GPU, found)), found)
    assert SIMULATED.races() == []


@pytest.mark.parametrize("averager", GOSSIP, ids=repr)
def test_a_round_in_flight_after_loading(averager):
    """What was loaded is memory of the training's stream, and rounds beside the training change it."""
    strategy, world = tw.Gossip(averager, overlap=True, staleness=1), tw.LocalWorld(4)
    found = world.run(trained, strategy, 0.9, *on(GPU))
    assert_equal(world.run(trained, strategy, 0.9, *on(GPU, found)), found)


def read_what_another_stream_writes(is_right):
    x, side = torch.ones(3, device=GPU), torch.cuda.Stream()
    if is_right:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.sum()
    torch.cuda.synchronize()


def free_what_another_stream_reads(is_right):
    x, side = torch.ones(3, device=GPU), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.sum()
    if is_right:
        x.record_stream(side)
    del x
    torch.empty(3, device=GPU)
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    "program, message",
    [(read_what_another_stream_writes, "has not waited"), (free_what_another_stream_reads, "may be taken again")],
)
def test_a_race_is_an_error(program, message):
    torch.cuda.synchronize()
    program(True)
    assert SIMULATED.races() == []
    with pytest.raises(RuntimeError, match=message):
        program(False)
    assert len(SIMULATED.races()) == 1


def test_a_copy_to_the_host_arrives_when_the_host_waits():
    x, pinned = torch.arange(3.0, device=GPU), torch.zeros(3).pin_memory()
    pinned.copy_(x, non_blocking=True)
    assert pinned.isnan().all()
    torch.cuda.current_stream().record_event().synchronize()
    assert pinned.tolist() == [0, 1, 2]


def test_tensors_of_two_devices_do_not_mix():
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device=GPU) + torch.ones(2)
    with pytest.raises(RuntimeError, match="'mat2' is in main memory"):
        torch.ones(2, 2, device=GPU) @ torch.ones(2, 2)
