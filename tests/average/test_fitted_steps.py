"""Step sizes that follow from measurements: convergence without tuning, agreement, saving, and their definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.cases import case
from helpers.codecs import gossiped
from helpers.fitted import fitted
from helpers.lockstep import gossip_in_lockstep

import thinwire as tw
from thinwire.average.gossip.moniqua_step import MoniquaStepControl
from thinwire.topology import Graph


def starts(size=8, shape=(20, 20)):
    return torch.stack([torch.randn(shape, generator=torch.Generator().manual_seed(rank)) for rank in range(size)])


def error(x):
    return float((x - x.mean(0)).double().square().sum())


@pytest.mark.parametrize(
    "averager",
    [tw.Choco(tw.Ring(), tw.TopK(0.1)), tw.DeepSqueeze(tw.Ring(), tw.codec.SignNorm()), tw.Moniqua()],
    ids=repr,
)
def test_defaults_agree_on_a_ring_of_eight(averager):
    x = starts()
    mean, before = x.mean(0), error(x)
    states = gossip_in_lockstep(averager, x, 160)
    assert before > 50 * error(x)
    torch.testing.assert_close(x.mean(0), mean, rtol=0, atol=1e-4)
    assert len({tuple(averager.diagnostics(state).values())[0] for state in states}) == 1


@pytest.mark.parametrize(
    ("averager", "zeros"),
    [(tw.Choco(), [0]), (tw.Choco(codec=tw.TopK(0.1)), range(1, 8)), (tw.DeepSqueeze(), range(1, 8))],
    ids=str,
)
def test_workers_of_zeros_agree_too(averager, zeros):
    """They measured nothing, and so nobody ever moved."""
    x = starts()
    x[list(zeros)] = 0.0
    mean, before = x.mean(0), error(x)
    gossip_in_lockstep(averager, x, 200)
    assert before > 50 * error(x)
    torch.testing.assert_close(x.mean(0), mean, rtol=0, atol=1e-4)


def test_while_all_values_are_zeros_the_step_is_too():
    """Otherwise the first values would move by the step of a codec without loss."""
    averager, x = tw.Choco(codec=tw.TopK(0.1)), torch.zeros(8, 20, 20)
    states = gossip_in_lockstep(averager, x, 20)
    assert {averager.diagnostics(state)["step_size"] for state in states} == {0.0} and not x.any()


@pytest.mark.parametrize("kind", [tw.Choco, tw.DeepSqueeze])
def test_no_codec_makes_the_defaults_diverge(kind):
    """benchmarks/step_sizes.py does 5,000 rounds of this; these are the coarse ones and the fast divergence."""
    for codec in gossiped():
        if codec.nbytes(100) < 50 or isinstance(codec, tw.codec.SVD):  # coarse ones; fine ones leave no error
            errors = []
            fitted(kind, codec, starts(shape=(10, 10)), 60, lambda _, x, errors=errors: errors.append(error(x)))
            with case(codec):
                assert max(errors[30:]) < errors[0]


@pytest.mark.parametrize(
    "averager",
    [
        tw.Choco(codec=tw.QSGD(bits=2)),
        tw.Choco(codec=tw.QSGD(bits=2, bucket_size=16), step_size=0.1),
        tw.Choco(codec=tw.NUQSGD(bits=3)),  # decoded before it is added
    ],
    ids=repr,
)
def test_the_mean_of_choco_does_not_drift(averager):
    """By more than a few roundings of float32 in 500 rounds. With gaps in float32 it moves ten times as far."""
    x = starts(5)
    mean = x.double().mean(0)
    gossip_in_lockstep(averager, x, 500)
    assert (x.double().mean(0) - mean).square().mean().sqrt() < 5e-7
    assert error(x) < 1e-5


@pytest.mark.parametrize("kind", [tw.Choco, tw.DeepSqueeze])
def test_averagers_follow_the_definition(kind):
    """With a codec that draws no random numbers, whose keys the simulation would have to share."""
    expected, x = [], starts(5)
    step_size = fitted(kind, tw.TopK(0.2), x, 12, lambda _, now: expected.append(now))
    averager = kind(tw.Ring(), tw.TopK(0.2))
    states = gossip_in_lockstep(averager, x, 12)
    assert averager.diagnostics(states[0])["step_size"] == pytest.approx(step_size, rel=1e-4)
    assert ((x - expected[-1]).abs() > 1e-4).double().mean() < 0.01


@pytest.mark.parametrize(
    "averager", [tw.Choco(), tw.DeepSqueeze(tw.Ring(), tw.RandomK(0.2)), tw.Moniqua(tw.Exponential())], ids=repr
)
def test_a_saved_state_goes_on_to_the_bit(averager):
    def worker(comm, stop):
        tensors = [("x", starts(4)[comm.rank])]
        before = tensors[0][1].clone()
        state = averager.init(tensors, comm)
        for step in range(11):
            if step == stop:
                saved = state.state_dict()
                averager.step(state, tensors, comm).wait()  # what is loaded must not be what goes on changing
                tensors = [("x", before.clone())]
                state = averager.init(tensors, comm)
                state.load_state_dict(saved)
            averager.step(state, tensors, comm).wait()
            before = tensors[0][1].clone()
        return before, averager.diagnostics(state)

    whole, resumed = (tw.LocalWorld(4).run(worker, stop) for stop in (None, 5))
    for (x, found), (y, other) in zip(whole, resumed, strict=True):
        assert torch.equal(x, y) and found == other and found["step_size"] > 0


def test_moniqua_finds_out_that_its_bound_was_too_low():
    """Workers agree, so the bound falls; then they differ a thousand times more, without warning."""
    jump, errors, means = 1000.0 * starts(4).flip(0), [], []

    def watch(step, x):
        if step == 150:
            errors.append(error(x))
            x.add_(jump)
            means.append(x.mean(0))
            errors.append(error(x))

    x = starts(4)
    gossip_in_lockstep(tw.Moniqua(), x, 500, watch)
    assert errors[0] < 1.0 and error(x) < errors[1] / 1000
    torch.testing.assert_close(x.mean(0), means[0], rtol=0, atol=0.05)


def test_steps_above_one_are_faster():
    """The slowest difference on a ring of 8 shrinks by |1 - 1.3084 mu_2| = 0.7444 a round, and by 0.8047 at step size 1."""
    slowest = torch.cos(torch.arange(8) * (2 * torch.pi / 8)).view(8, 1)
    for averager, factor in ((tw.Mix(), 0.8047), (tw.Mix(step_size=1.3084), 0.7444)):
        x = slowest.clone()
        gossip_in_lockstep(averager, x, 10)
        assert (x.norm() / slowest.norm()).item() == pytest.approx(factor**10, rel=2e-3)


def test_moniqua_counts_the_largest_weight_of_any_worker():
    """On an irregular graph, that of rank 0 may be less, and the step would be too large."""
    graph = Graph(((0, 1), (1, 2), (1, 3), (1, 4), (1, 5), (5, 6), (6, 7)))
    p, mu = 1 / 3, float(np.linalg.eigvalsh(np.eye(8) - graph.matrix(0, 8))[-1])
    control = MoniquaStepControl.of(graph, 8, torch.device("cpu"), 1.0, {})
    assert control._best_step(1.5) == pytest.approx(1 / (2 * p * 1.5 + mu))
