"""Averaging alone: the records against a simulation, and what they leave out."""

from __future__ import annotations

import pytest
import torch
from helpers.spawn import WORLDS

import thinwire as tw


def experiment(comm, averager, rounds, every=1):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(comm.rank))
    seen = []
    records = tw.consensus([("x", x)], averager, rounds, comm, every=every, on_record=seen.append)
    assert seen == records
    return records, x, comm.ledger.bytes_sent


def simulate(topology, size, rounds):
    x = torch.stack([torch.randn(3, 4, generator=torch.Generator().manual_seed(r)).double() for r in range(size)])
    mean, x = x.mean(0).view(-1), x.view(size, -1)
    for step in range(rounds + 1):
        yield ((x - mean).square().sum() / size).item()
        x = torch.from_numpy(topology.matrix(step, size)) @ x


@pytest.mark.parametrize("world", WORLDS)
def test_records_of_mix(world):
    results = WORLDS[world](4, experiment, tw.Mix(), 5)
    records = results[0][0]
    assert all(result[0] == records for result in results)
    assert [r.round for r in records] == list(range(6))
    assert [r.bits_sent for r in records] == [8 * 4 * 2 * 48 * k for k in range(6)]
    assert [r.messages for r in records] == [4 * 2 * k for k in range(6)]
    assert [r.squared_error for r in records] == pytest.approx(list(simulate(tw.Ring(), 4, 5)), rel=1e-4)
    assert all(8 * result[2] > records[-1].bits_sent / 4 for result in results)  # measuring has its price, elsewhere


def test_push_sum_is_measured_and_left_without_its_bias():
    topology = tw.topology.Star(weights="uniform")
    results = tw.LocalWorld(5).run(experiment, tw.PushSum(topology), 60)
    mean = sum(torch.randn(3, 4, generator=torch.Generator().manual_seed(r)) for r in range(5)) / 5
    assert results[0][0][-1].squared_error < 1e-9
    for _, x, _ in results:
        torch.testing.assert_close(x, mean, rtol=0, atol=1e-5)


def test_a_mean_agrees_at_once():
    records = tw.LocalWorld(4).run(experiment, tw.Mean(), 2)[0][0]
    assert records[0].squared_error > 1
    assert records[1].squared_error < 1e-12


def test_rounds_that_are_recorded():
    records = tw.LocalWorld(2).run(experiment, tw.Mix(), 7, 3)[0][0]
    assert [r.round for r in records] == [0, 3, 6, 7]


def test_compressed_gossip_needs_fewer_bits_to_a_given_error():
    """Differences of low rank, as in training: PowerGossip sends n + m floats where Mix sends n m."""

    def worker(comm, averager, rounds):
        g = torch.Generator().manual_seed(comm.rank)
        x = torch.randn(64, 1, generator=g) @ torch.randn(1, 64, generator=g)
        return tw.consensus([("x", x)], averager, rounds, comm)

    def bits_to(averager, rounds):
        records = tw.LocalWorld(8).run(worker, averager, rounds)[0]
        return next(r.bits_sent for r in records if r.squared_error < 0.01 * records[0].squared_error)

    assert bits_to(tw.PowerGossip(), 250) < bits_to(tw.Mix(), 60)


@pytest.mark.parametrize("options", [{"rounds": -1}, {"rounds": 2, "every": 0}], ids=repr)
def test_mistakes(options):
    def worker(comm):
        with pytest.raises(ValueError, match=r"consensus: (rounds|every) must be"):
            tw.consensus([("x", torch.zeros(2))], tw.Mix(), comm=comm, **options)

    tw.LocalWorld(1).run(worker)
