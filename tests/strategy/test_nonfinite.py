"""What happens to a backward pass whose averaged gradient is infinite or NaN."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from helpers.states import leaves
from torch import nn

import thinwire as tw

SPARSE = tw.Mean(tw.TopK(0.5), tw.ErrorFeedback())


def attached(comm, averager=SPARSE, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    return model, tw.compress_gradients(model, averager, comm=comm, bucket_bytes=32, **options)


def backward(model, factor=1.0):
    model.zero_grad()
    (model(torch.linspace(-1, 1, 12).view(3, 4)).square().sum() * factor).backward()


def snapshot(model, optimizer):
    return copy.deepcopy([model.state_dict(), optimizer.state_dict()["state"]])


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("averager", [SPARSE, tw.Mean(), tw.PowerSGD(rank=1), tw.Mean(tw.QSGD(bits=4))], ids=repr)
def test_one_worker_with_nan_skips_the_step_on_all(name, averager):
    """Neither weights, momentum, weight decay nor numbers of steps move, and training goes on."""

    def worker(comm):
        model, handle = attached(comm, averager)
        optimizer = OPTIMIZERS[name](model.parameters())
        backward(model), optimizer.step()
        before = snapshot(model, optimizer)
        backward(model, float("nan") if comm.rank == 1 else 1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
        unmoved = same(before, snapshot(model, optimizer))
        backward(model), optimizer.step()
        moved = not same(before, snapshot(model, optimizer))
        skipped, weight = handle.num_skipped, model[0].weight.detach().clone()
        handle.detach()
        return unmoved, moved, skipped, weight.tolist()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        results = tw.LocalWorld(3).run(worker)
    assert all(result[:3] == (True, True, 1) for result in results), results
    assert results[0][3] == results[1][3] == results[2][3]


def test_a_closure_is_skipped_too():
    def worker(comm):
        model, handle = attached(comm)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=1)
        before = copy.deepcopy(model.state_dict())

        def closure():
            backward(model, float("inf") if comm.rank == 0 else 1.0)
            return torch.tensor(1.0)

        optimizer.step(closure)
        handle.detach()
        return same(before, model.state_dict()), handle.num_skipped

    with pytest.warns(RuntimeWarning, match="Gradients: a step was not finite and is skipped"):
        assert tw.LocalWorld(2).run(worker) == [(True, 1)] * 2


@pytest.mark.parametrize("options, num_fine", [({"on_nonfinite": "raise"}, 0), ({"max_nonfinite": 3}, 2)])
def test_the_error_names_the_first_worker_and_parameter(options, num_fine):
    def worker(comm):
        model, handle = attached(comm, **options)
        if comm.rank == 2:  # one parameter alone
            model[1].weight.register_hook(lambda gradient: gradient * float("nan"))
        for _ in range(num_fine):
            backward(model)
        with pytest.raises(FloatingPointError, match=r"not finite; first on rank 2, parameter '1\.weight'"):
            backward(model)
        assert handle.num_skipped == num_fine
        handle.detach()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        tw.LocalWorld(3).run(worker)


def test_finite_steps_in_between_start_the_count_anew():
    def worker(comm):
        model, handle = attached(comm, max_nonfinite=2)
        for factor in (float("nan"), 1.0, float("nan"), 1.0):
            backward(model, factor)
        handle.detach()
        return handle.num_skipped

    with pytest.warns(RuntimeWarning) as caught:
        assert tw.LocalWorld(1).run(worker) == [2]
    assert len(caught) == 1  # warned of once


def test_apply_applies():
    def worker(comm):
        model, handle = attached(comm, on_nonfinite="apply")
        optimizer = OPTIMIZERS["SGD"](model.parameters())
        backward(model, float("nan")), optimizer.step()
        handle.detach()
        return model[0].weight.isnan().any().item(), handle.num_skipped

    assert tw.LocalWorld(1).run(worker) == [(True, 0)]


def test_a_loss_scaler_skips_by_itself_and_nothing_warns():
    def worker(comm):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        model, handle = attached(comm, scaler=scaler)
        optimizer = OPTIMIZERS["AdamW"](model.parameters())
        before = copy.deepcopy(model.state_dict())
        backward(model, scaler.scale(torch.tensor(float("inf")))), scaler.step(optimizer), scaler.update()
        handle.detach()
        return same(before, model.state_dict()), handle.num_skipped, scaler.get_scale()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tw.LocalWorld(2).run(worker) == [(True, 1, 1.0)] * 2


LEVELS = [tw.ALQ(bits=3), tw.AMQ(bits=3), tw.NUQSGD(bits=3), tw.QSGD(bits=2, norm="l2")]


@pytest.mark.parametrize("codec", LEVELS, ids=repr)
def test_a_mean_that_float16_cannot_hold_is_skipped(codec):
    """The codec's mean is finite in float32 and infinite once it is written: no update, memory and counts as before."""

    def worker(comm):
        model = nn.Linear(64, 64, bias=False).half()
        handle = tw.compress_gradients(model, tw.Mean(codec, tw.ErrorFeedback()), comm=comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        generator, skips = torch.Generator().manual_seed(comm.rank), 0
        for _ in range(4):
            memory = leaves(handle.state_dict()[f"rank{comm.rank}"]["memory"])
            signs = torch.randn(64, 64, generator=generator).sign()
            weights = model.weight.detach().clone()
            model.zero_grad()
            (model.weight * (signs * 3e4).half()).sum().backward()
            skipped = not model.weight.grad.isfinite().all().item()
            skips += skipped
            optimizer.step()
            assert model.weight.isfinite().all() and handle.num_skipped == skips
            assert not skipped or torch.equal(model.weight, weights)
            assert skipped == same(memory, leaves(handle.state_dict()[f"rank{comm.rank}"]["memory"]))
        handle.detach()
        return skips

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        skips = tw.LocalWorld(2).run(worker)
    assert skips[0] == skips[1] > 0


@pytest.mark.parametrize("strategy", ["Gradients({})", "Local({}, every=1, on_nonfinite='apply')"])
def test_a_sum_on_the_wire_that_float16_cannot_hold_leaves_models_finite(strategy):
    """Each worker's values can be sent, and their sum cannot: the step, or the round, is skipped on all workers."""

    def worker(comm):
        model = nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        averager = "Mean(Cast('float16'), exchange='all_reduce')"
        with tw.attach(model, optimizer, strategy.format(averager), comm=comm):
            before = model.weight.detach().clone()
            for size in (40_000.0, 4.0):
                model.zero_grad()
                (model.weight * size).sum().backward()
                optimizer.step()
                moved = before - model.weight.detach()
                torch.testing.assert_close(moved, torch.full((1, 2), 0.0 if size > 4 else 4.0), atol=1e-2, rtol=0)

    with pytest.warns(RuntimeWarning, match="not finite"):
        tw.LocalWorld(2).run(worker)
