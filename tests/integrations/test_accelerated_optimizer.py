"""Strategies that step with Accelerate's optimizer wrapper, with the real package."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

import thinwire as tw


@pytest.fixture
def accelerator():
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


def gossip(model, optimizer, comm):
    return tw.gossip_parameters(model, optimizer, tw.Mix(), comm=comm)


def local(model, optimizer, comm):
    return tw.local_updates(model, optimizer, tw.Mean(), every=2, comm=comm)


def asynchronous(model, optimizer, comm):
    return tw.gossip_asynchronously(model, optimizer, comm=comm)


def train(comm, attach, prepare):
    """The weights after four steps on data that differ between workers, and the bytes that were sent."""
    generator = torch.Generator().manual_seed(comm.rank)
    model = torch.nn.Linear(4, 2)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)
    optimizer = prepare(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    handle = attach(model, optimizer, comm)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 4, generator=generator)).square().mean().backward()
        optimizer.step()
    handle.synchronize()
    sent = handle.ledger.bytes_sent
    handle.detach()
    return model.weight.detach().clone(), sent


@pytest.mark.parametrize("attach", [gossip, local])
def test_the_wrapped_optimizer_averages_to_the_same_bits(accelerator, attach):
    plain = tw.LocalWorld(2).run(lambda comm: train(comm, attach, lambda optimizer: optimizer))
    wrapped = tw.LocalWorld(2).run(lambda comm: train(comm, attach, accelerator.prepare_optimizer))
    for (expected, expected_sent), (got, sent) in zip(plain, wrapped, strict=True):
        assert torch.equal(got, expected) and sent == expected_sent > 0


def test_pairs_average_with_the_wrapped_optimizer(accelerator):
    attach = asynchronous
    for _, sent in tw.LocalWorld(2).run(lambda comm: train(comm, attach, accelerator.prepare_optimizer)):
        assert sent >= 4 * (4 * 2 + 2)


class Wrapper(torch.optim.Optimizer):
    """A wrapper that has no hooks, as some published ones."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def step(self, closure=None):
        return self.optimizer.step(closure)


@pytest.mark.parametrize("attach", [gossip, local, asynchronous])
def test_other_wrappers_are_refused_with_one_line(attach):
    def worker(comm):
        model = torch.nn.Linear(4, 2)
        with pytest.raises(ValueError, match="Wrapper has no step hooks.*pass the torch.optim optimizer"):
            attach(model, Wrapper(torch.optim.SGD(model.parameters(), lr=0.1)), comm)

    tw.LocalWorld(2).run(worker)
