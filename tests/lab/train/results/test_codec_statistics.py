"""Variance and levels of a run: against closed forms, and without a trace in the run itself."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from thinwire.lab.train.results.codec_statistics import codec_statistics, own_gradients


def found_by(averager, gradients):
    """What `codec_statistics` finds for these gradients, before the first step."""

    def worker(comm):
        model = torch.nn.Linear(2, 2)
        handle = tw.compress_gradients(model, averager, comm=comm)
        try:
            return codec_statistics(handle, gradients)
        finally:
            handle.detach()

    return tw.LocalWorld(1).run(worker)[0]


def matrix(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_variance_of_top_k_is_the_share_of_what_it_drops():
    g, bias = matrix(20, 30), matrix(30)
    squares = g.double().flatten().square().sort().values
    expected = (squares[:540].sum() / squares.sum()).item()
    found = found_by(tw.Mean(tw.TopK(0.1)), {"weight": g, "bias": bias})  # biases travel dense
    assert found == {"variance": pytest.approx(expected, rel=1e-6)}


def test_variance_of_stochastic_rounding_has_the_expected_value():
    g = matrix(400, 500).clamp(-3, 3)
    scale = g.abs().max().double()
    # An element r between 0 and the scale s becomes s with probability r/s: its variance is r (s - r).
    expected = ((g.abs().double() * (scale - g.abs())).sum() / g.double().square().sum()).item()
    codec = tw.codec.Quantize((-1.0, 0.0, 1.0), bucket_size=g.numel(), norm="max")
    assert found_by(tw.Mean(codec), {"weight": g})["variance"] == pytest.approx(expected, rel=0.02)


def test_granularity_decides_what_is_encoded_as_one():
    gradients = {"a": matrix(10, 10), "b": 100 * matrix(10, 10)}
    squares = [gradients[name].double().square().flatten() for name in "ab"]
    both = torch.cat(squares)
    of_all = (1 - both.topk(20).values.sum() / both.sum()).item()
    of_each = (1 - sum(s.topk(10).values.sum() for s in squares) / both.sum()).item()
    assert found_by(tw.Mean(tw.TopK(0.1)), gradients)["variance"] == pytest.approx(of_each, rel=1e-5)
    assert found_by(tw.Mean(tw.TopK(0.1), granularity="model"), gradients)["variance"] == pytest.approx(
        of_all, rel=1e-5
    )


@pytest.mark.parametrize("averager", [tw.Mean(), tw.PowerSGD(rank=1), tw.Mean(tw.SignSGD(scale=0.1))])
def test_nothing_where_there_is_no_variance(averager):
    assert found_by(averager, {"weight": matrix(4, 4)}) == {}


def test_nothing_of_parameters_and_of_zeros():
    assert found_by(tw.Mean(tw.TopK(0.5)), {"weight": torch.zeros(4, 4)}) == {}

    def worker(comm):
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = tw.gossip_parameters(model, optimizer, tw.Mix(tw.Ring()), comm=comm)
        try:
            return codec_statistics(handle, {"weight": matrix(2, 2)})
        finally:
            handle.detach()

    assert tw.LocalWorld(2).run(worker) == [{}, {}]


def train(comm, averager, watched):
    """Five steps; parameters, bytes, random state, and what was seen on the way."""
    model, seen = torch.nn.Linear(40, 30), []
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
    handle = tw.compress_gradients(model, averager, comm=comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        inputs = torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * step + comm.rank))
        optimizer.zero_grad()
        if watched:
            with own_gradients(model) as gradients:
                model(inputs).square().mean().backward()
            (own,) = torch.autograd.grad(model(inputs).square().mean(), [model.weight])
            assert torch.equal(gradients["weight"], own)  # not the mean of all
            random_state = torch.get_rng_state()
            seen.append(codec_statistics(handle, gradients))
            assert torch.equal(torch.get_rng_state(), random_state)
        else:
            model(inputs).square().mean().backward()
        optimizer.step()
    handle.detach()
    return [p.detach().clone() for p in model.parameters()], handle.ledger.bytes_sent, seen


def test_own_gradients_are_free_of_the_loss_scale():
    """A threshold would keep all of the others."""
    model, x = torch.nn.Linear(40, 3), matrix(8, 40)
    with own_gradients(model, scale=1024.0) as gradients:
        for _ in range(2):
            (1024.0 * model(x).square().mean()).backward()
    (own,) = torch.autograd.grad(model(x).square().mean(), [model.weight])
    assert torch.equal(gradients["weight"], 2 * own)


@pytest.mark.parametrize(
    "codec",
    [tw.ALQ(bits=2, norm="max", update_steps=(2,)), tw.chain(tw.TopK(0.3), tw.AMQ(bits=3, update_steps=(2,)))],
    ids=repr,
)
def test_a_watched_run_is_the_same_run(codec):
    averager = tw.Mean(codec, tw.ErrorFeedback())
    watched = tw.LocalWorld(2).run(train, averager, True)
    plain = tw.LocalWorld(2).run(train, averager, False)
    for (parameters, sent, seen), (expected, expected_sent, _) in zip(watched, plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(parameters, expected, strict=True)) and sent == expected_sent
        levels = [row["levels"] for row in seen]
        assert levels[0] != levels[-1] and levels[-1][0] == -1 and levels[-1] == sorted(levels[-1])
        assert all(0 < row["variance"] < 20 for row in seen)
    assert watched[0][2][-1]["levels"] == watched[1][2][-1]["levels"]


def test_a_codec_fitted_to_layers_shows_its_choice():
    gradients = {"weight": matrix(2, 2), "bias": matrix(2)}
    codec = tw.Fitted(tw.QSGD(bits=8), candidates="quantizers")
    found = found_by(tw.Mean(codec), gradients)
    assert found["bits"] == found["budget_bits"] == 8 * tw.QSGD(bits=8).nbytes(4) / 4
    assert 0 < found["variance"] < 1e-3 and "error" not in found  # nothing is measured yet
