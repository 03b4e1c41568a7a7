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
from strategy.test_compositions import SAVED, STEPS, Model, Refused, strategies
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
    trained = [p for p in model.parameters() if p.requires_grad]
    return sum((p * torch.randn(p.shape, generator=generator).to(p.device)).sum() + (p * p).sum() / 2 for p in trained)


def trained(comm, strategy, momentum, device, saved=None):
    """The model after all steps, and what was saved on the way."""
    model, on_the_way = copy.deepcopy(MODEL).to(device), None
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.05, momentum=momentum)
    with tw.attach(model, optimizer, strategy, comm=comm) as handle:
        parts = model, optimizer, handle
        if saved is not None:
            for part, state in zip(parts, copy.deepcopy(saved[comm.rank]), strict=True):
                part.load_state_dict(state)
        for step in range(0 if saved is None else SAVED, STEPS):
            if step == SAVED:
                on_the_way = copy.deepcopy([part.state_dict() for part in parts])
            optimizer.zero_grad()
            loss_of(model, step, comm.rank).backward()
            optimizer.step()
    return [p.detach().cpu() for p in model.parameters()], on_the_way


def assert_equal(found, expected, exact=True):
    for (ours, _), (theirs, _) in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **({"rtol": 0, "atol": 0} if exact else {"rtol": 1e-3, "atol": 1e-3}))


@settings(max_examples=100)
@given(parts=st.data(), workers=st.sampled_from([1, 2, 4]), momentum=st.sampled_from([0.0, 0.9]))
def test_random_compositions(parts, workers, momentum):
    try:
        strategy = parts.draw(strategies())
    except Refused:
        return
    world = tw.LocalWorld(workers)
    try:
        expected = world.run(trained, strategy, momentum, CPU)
    except ValueError:
        with pytest.raises(ValueError):
            world.run(trained, strategy, momentum, GPU)
        return
    found = world.run(trained, strategy, momentum, GPU)
    assert_equal(found, expected, exact=not BY_DEVICE.search(repr(strategy)))
    assert_equal(world.run(trained, strategy, momentum, GPU, [saved for _, saved in found]), found)
    assert SIMULATED.races() == []


@pytest.mark.parametrize("averager", GOSSIP, ids=repr)
def test_a_round_in_flight_after_loading(averager):
    """What was loaded is memory of the training's stream, and rounds beside the training change it."""
    strategy, world = tw.Gossip(averager, overlap=True, staleness=1), tw.LocalWorld(4)
    found = world.run(trained, strategy, 0.9, GPU)
    assert_equal(world.run(trained, strategy, 0.9, GPU, [saved for _, saved in found]), found)


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
