"""What integrations show: waiting time that is true for every strategy, and sums over handles."""

from __future__ import annotations

import time

import pytest
import torch
from helpers.busy import always

import thinwire as tw
from thinwire.integrations.numbers import numbers

STRATEGIES = {
    "gradients": lambda model, optimizer, comm: tw.compress_gradients(model, tw.Mean(tw.QSGD(bits=4)), comm=comm),
    "gossip": lambda model, optimizer, comm: tw.gossip_parameters(model, optimizer, tw.Mix(), comm=comm),
    "overlap": lambda model, optimizer, comm: tw.gossip_parameters(
        model, optimizer, tw.PushSum(), comm=comm, overlap=True
    ),
    "local": lambda model, optimizer, comm: tw.local_updates(model, optimizer, tw.Mean(), every=2, comm=comm),
    "delayed": lambda model, optimizer, comm: tw.local_updates(
        model, optimizer, tw.Mean(), every=2, delay=1, comm=comm
    ),
}


@pytest.mark.parametrize("name", ["gradients", "local", "delayed"])
def test_bytes_are_compared_with_those_of_dense_training_in_every_step(name):
    """For local updates, the rounds that were left out did not count."""

    def worker(comm):
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with STRATEGIES[name](model, optimizer, comm) as handle:
            for _ in range(5):
                model(torch.ones(1, 64)).sum().backward()
                optimizer.step()
            shown = numbers(handle)
            return shown["thinwire/sent_mb"] * shown["thinwire/fewer_than_fp32"]

    assert tw.LocalWorld(2).run(worker) == pytest.approx(2 * [5 * 4 * (64 * 64 + 64) / 1e6])


@pytest.mark.parametrize("attach", STRATEGIES.values(), ids=STRATEGIES)
def test_who_waits_for_a_slow_worker_is_blocked(attach):
    """Worker 1 sleeps 0.05 s in each of six steps; worker 0 waits for most of that, and worker 1 for little."""

    def worker(comm):
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with attach(model, optimizer, comm) as handle:
            before = handle.blocked_seconds
            for _ in range(6):
                optimizer.zero_grad()
                time.sleep(0.05 * comm.rank)
                model(torch.ones(1, 64)).sum().backward()
                optimizer.step()
            shown, twice = numbers(handle), numbers(handle, handle)
            assert shown["thinwire/blocked_seconds"] == handle.blocked_seconds
            assert twice["thinwire/sent_mb"] == 2 * shown["thinwire/sent_mb"] > 0
            assert twice["thinwire/fewer_than_bf16"] == shown["thinwire/fewer_than_bf16"]
            return handle.blocked_seconds - before

    def wrong():
        fast, slow = tw.LocalWorld(2).run(worker)
        assert fast > 0.1
        return set() if fast > 2 * slow else {"slow"}

    assert not always(wrong)
