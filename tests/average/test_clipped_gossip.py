"""ClippedGossip against its equation, and what one wrong neighbour can do."""

from __future__ import annotations

import math

import pytest
import torch

import thinwire as tw
from thinwire.average import ClippedGossip

SIZE, N = 8, 40


def starts(seed=0):
    return torch.randn(SIZE, N, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gossip(averager, x, rounds=1):
    """The values of all workers after some rounds, and the state of each worker."""

    def worker(comm):
        own = x[comm.rank].clone()
        state, committed = averager.init([("x", own)], comm), True
        for _ in range(rounds):
            averager.step(state, [("x", own)], comm).wait()
            committed = averager.commit(state)
        return own, state, committed

    return tw.LocalWorld(SIZE).run(worker)


def clipped_gossip(averager, x, step=0):
    after = x.clone()
    for i in range(SIZE):
        near = averager.topology.neighbours(i, step, SIZE).receives
        distances = sorted((float((x[j] - x[i]).norm()) for j in near), reverse=True)
        tau = distances[averager.faulty] if averager.tau is None else averager.tau
        for j, weight in near.items():
            after[i] += weight * (x[j] - x[i]) * min(1.0, tau / float((x[j] - x[i]).norm()))
    return after


@pytest.mark.parametrize(
    "averager",
    [
        ClippedGossip(),
        ClippedGossip(tw.Complete(), faulty=2),
        ClippedGossip(tw.topology.Torus(), faulty=0),
        ClippedGossip(tw.Exponential(), tau=3.0),
    ],
    ids=repr,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_round_is_the_equation(averager, dtype):
    x = starts().to(dtype)
    x[2] *= 100
    after = torch.stack([own for own, *_ in gossip(averager, x)])
    tolerance = 1e-4 if dtype == torch.float32 else 1e-12  # float32 values of about 100 round at 1e-5
    torch.testing.assert_close(after.double(), clipped_gossip(averager, x.double()), rtol=0, atol=tolerance)


def test_an_infinite_bound_gives_plain_gossip_bit_for_bit():
    clipped, plain = gossip(ClippedGossip(tau=math.inf), starts(), 3), gossip(tw.Mix(), starts(), 3)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(clipped, plain, strict=True))


def test_a_neighbour_that_is_not_finite_is_left_out():
    x = starts()
    x[2, 0] = math.nan
    averager = ClippedGossip(tw.Complete())
    for rank, (own, state, committed) in enumerate(gossip(averager, x, 30)):
        if rank == 2:
            assert not committed
            continue
        assert committed and own.isfinite().all()
        assert averager.diagnostics(state)["clipped/2"] == math.inf
        assert (own - x[[0, 1, 3, 4, 5, 6, 7]].mean(0)).norm() < 3.0


def test_a_liar_that_never_moves_cannot_pull_the_others_away():
    def worker(comm, averager):
        own = starts()[comm.rank]
        state = averager.init([("x", own)], comm)
        for _ in range(30):
            if comm.rank == 5:
                own.fill_(1e6)
            averager.step(state, [("x", own)], comm).wait()
        return own.norm().item()

    world, honest = tw.LocalWorld(SIZE), [rank for rank in range(SIZE) if rank != 5]
    robust = world.run(worker, ClippedGossip(tw.Complete()))
    plain = world.run(worker, tw.Mix(tw.Complete()))
    assert max(robust[rank] for rank in honest) < 20 and min(plain[rank] for rank in honest) > 1e5


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: ClippedGossip(tau=0.0), "tau must be above 0, or None"),
        (lambda: ClippedGossip(faulty=-1), "faulty must be an integer, 0 or more"),
        (lambda: ClippedGossip(tw.topology.Hierarchical(tw.Ring(), workers_per_node=2)), "plain mean"),
        (lambda: ClippedGossip().check_topology(2), "a worker has 1 neighbours among 2 workers"),
        (lambda: ClippedGossip(tw.Exponential()).check_topology(8), "a worker has 1 neighbours .* or give tau"),
        (lambda: ClippedGossip(faulty=2).check_topology(8), "faulty=2 needs 3 or more"),
        (lambda: ClippedGossip(tw.topology.Star(weights="uniform"), tau=1.0).check_topology(8), "doubly stochastic"),
    ],
)
def test_what_does_not_suit_is_refused(make, line):
    with pytest.raises(ValueError, match=line):
        make()
