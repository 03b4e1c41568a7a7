"""`tw.dgc` in a training loop: real processes, epochs, checkpoints, optimizers."""

from __future__ import annotations

import pytest
import torch
from helpers.gradients import batch, fingerprint, make_model
from helpers.spawn import spawn
from helpers.states import leaves
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw


def step(model, optimizer, rank, number, scale=lambda loss: loss):
    optimizer.zero_grad()
    x, y = batch(rank, number)
    scale(nn.functional.cross_entropy(model(x), y)).backward()


def train(model, handle, optimizer, rank, epochs, first=0):
    for epoch in range(first, epochs):
        handle.set_epoch(epoch)
        for i in range(2):
            step(model, optimizer, rank, 2 * epoch + i)
            optimizer.step()


def sgd(model):
    return tw.strategy.DGCSGD([p for p in model.parameters() if p.requires_grad], lr=0.05, weight_decay=1e-3)


def ddp_worker(comm, averager, bucket_cap_mb):
    torch.set_num_threads(1)
    ddp = DistributedDataParallel(make_model(), bucket_cap_mb=bucket_cap_mb)
    handle = tw.compress_gradients(ddp, averager, seed=3)
    train(ddp, handle, sgd(ddp), comm.rank, epochs=4)
    memory = handle.state_dict()[f"rank{comm.rank}"]["memory"]
    handle.detach()
    return fingerprint(ddp.module), sorted(leaves(memory))


@pytest.mark.parametrize(
    ("averager", "bucket_caps_mb"),
    [
        (tw.dgc(ratio=0.05, warmup_epochs=2), (25, 0.002)),
        (tw.dgc(ratio=0.05, warmup_epochs=2, nesterov=True, bits=4, clip=tw.average.ClipByNorm(1.0)), (0.002,)),
        (tw.dgc(ratio=tw.schedule.Values((1.0, 0.1)), clip=tw.average.ClipValueByGlobalNorm(0.5)), (0.002,)),
        (tw.dgc(ratio=0.1, warmup_epochs=0, sample=0.5, exchange="scatter_reduce"), (0.002,)),
    ],
    ids=repr,
)
def test_processes_stay_identical_in_however_many_buckets(averager, bucket_caps_mb):
    """Three workers, one bucket or one for each layer, with and without a warm-up: the same bits."""
    results = [result for cap in bucket_caps_mb for result in spawn(3, ddp_worker, averager, cap)]
    assert len({h for h, _ in results}) == 1
    names = results[0][1]
    assert {"momentum.head.weight", "velocity.head.weight", "mean_momentum.head.bias"} <= set(names)
    assert "velocity.head.bias" not in names


def test_a_resumed_run_is_the_same_run(tmp_path):
    def worker(comm, resume):
        model, path = make_model(), tmp_path / f"{comm.rank}.pt"
        handle, optimizer = tw.compress_gradients(model, tw.dgc(ratio=0.05), comm=comm), sgd(model)
        train(model, handle, optimizer, comm.rank, 3)
        if resume:
            torch.save([handle.state_dict(), optimizer.state_dict()], path)
            handle.detach()
            handle, optimizer = tw.compress_gradients(model, tw.dgc(ratio=0.05), comm=comm), sgd(model)
            saved, of_optimizer = torch.load(path, weights_only=True)
            handle.load_state_dict(saved), optimizer.load_state_dict(of_optimizer)
        train(model, handle, optimizer, comm.rank, 6, first=3)
        handle.detach()
        return fingerprint(model)

    assert tw.LocalWorld(2).run(worker, True) == tw.LocalWorld(2).run(worker, False)


def scaler_worker(comm, poison_step):
    torch.set_num_threads(1)
    ddp = DistributedDataParallel(make_model(), bucket_cap_mb=0.002)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    handle = tw.compress_gradients(ddp, tw.dgc(ratio=0.1, warmup_epochs=0), scaler=scaler)
    optimizer, memories, weights = sgd(ddp), [], []
    for number in range(5):
        poison = float("inf") if number == poison_step and comm.rank == 1 else 1.0
        step(ddp, optimizer, comm.rank, number, lambda loss, poison=poison: scaler.scale(loss * poison))
        scaler.step(optimizer)
        scaler.update()
        memories.append(leaves(handle.state_dict()[f"rank{comm.rank}"]["memory"]))
        weights.append(fingerprint(ddp.module))
    handle.detach()
    before, after = memories[poison_step - 1], memories[poison_step]
    return weights, all(torch.equal(before[name], value) for name, value in after.items())


def test_an_overflow_on_one_worker_leaves_no_trace_on_any():
    for weights, unchanged in (results := spawn(3, scaler_worker, 2)):
        assert unchanged
        assert weights[2] == weights[1]
        assert weights == results[0][0]


# ---- epochs ----


def test_the_ratio_follows_the_epoch():
    """0.01^(e+1)/6 of 200 coordinates, on one worker all that is not zero; the last value stays."""

    def worker(comm):
        model = nn.Linear(20, 10, bias=False)
        handle, kept = tw.compress_gradients(model, tw.dgc(ratio=0.01), comm=comm), []
        for epoch in range(7):
            handle.set_epoch(epoch)
            model.zero_grad()
            model(torch.randn(3, 20)).square().sum().backward()
            kept.append(int(model.weight.grad.count_nonzero()))
        handle.detach()
        return kept

    assert tw.LocalWorld(1).run(worker) == [[93, 44, 20, 10, 5, 2, 2]]


def test_workers_in_different_epochs_fail_together():
    def worker(comm):
        handle = tw.compress_gradients(make_model(), tw.dgc(), comm=comm)
        with pytest.raises(ValueError, match="epoch must be an integer, 0 or more, got -1"):
            handle.set_epoch(-1)
        with pytest.raises(ValueError, match=r"epoch: .*2.*rank 1"):
            handle.set_epoch(2 if comm.rank == 1 else 0)
        handle.detach()
        return True

    assert tw.LocalWorld(2, timeout_seconds=60).run(worker) == [True, True]


def forgetful_worker(comm):
    torch.set_num_threads(1)
    model, own = make_model(), tw.comm.ProcessGroupCommunicator(timeout_seconds=3)
    handle, optimizer = tw.compress_gradients(model, tw.dgc(), comm=own), sgd(model)
    if comm.rank == 0:
        handle.set_epoch(1)  # rank 1 forgets
    step(model, optimizer, comm.rank, 0)


def test_a_worker_that_forgets_the_epoch_is_noticed():
    errors = spawn(2, forgetful_worker, return_errors=True)
    assert any(isinstance(error, (tw.comm.CommunicationError, ValueError)) for error in errors)


# ---- optimizers ----


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "SGD has momentum 0.9"),
        (lambda p: torch.optim.Adam(p, lr=0.1), "Adam has momentum 0.9"),
    ],
)
def test_an_optimizer_with_momentum_of_its_own_is_an_error(build, name):
    def worker(comm):
        model = make_model()
        handle = tw.compress_gradients(model, tw.dgc(), comm=comm)
        optimizer = build(model.parameters())
        with pytest.raises(ValueError, match=f"{name} of its own.*use tw.strategy.DGCSGD"):
            handle.check_optimizer(optimizer)
        step(model, optimizer, comm.rank, 0)
        before = fingerprint(model)
        with pytest.raises(ValueError, match=name):
            optimizer.step()
        assert fingerprint(model) == before
        other = build([nn.Parameter(torch.ones(1, requires_grad=True))])
        handle.check_optimizer(other), other.step()  # not ours
        handle.detach()
        optimizer.step()
        return True

    assert tw.LocalWorld(1).run(worker) == [True]


def test_momentum_of_weight_decay_is_that_of_the_averager_or_none():
    def worker(comm):
        model = make_model()
        handle = tw.compress_gradients(model, tw.dgc(momentum=0.8), comm=comm)
        wrong = tw.strategy.DGCSGD(model.parameters(), lr=0.1, weight_decay=1e-4)
        with pytest.raises(
            ValueError, match=r"momentum 0.9 for weight decay, and the averager 0.8 .* give it momentum=0.8"
        ):
            handle.check_optimizer(wrong)
        with pytest.raises(ValueError, match="momentum 0.9 for weight decay"):
            wrong.step()
        for options in ({"weight_decay": 1e-4, "momentum": 0.8}, {"weight_decay": 1e-4, "momentum": 0.0}, {}):
            handle.check_optimizer(tw.strategy.DGCSGD(model.parameters(), lr=0.1, **options))
        handle.check_optimizer(tw.strategy.DGCSGD(make_model().parameters(), lr=0.1, weight_decay=1e-4))  # not ours
        handle.detach()
        return True

    assert tw.LocalWorld(1).run(worker) == [True]


def test_an_optimizer_with_momentum_is_right_for_other_averagers():
    def worker(comm):
        model = make_model()
        handle = tw.compress_gradients(model, tw.Mean(tw.TopK(0.1), tw.ErrorFeedback()), comm=comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        handle.check_optimizer(optimizer)
        step(model, optimizer, comm.rank, 0)
        optimizer.step()
        handle.detach()
        return True

    assert tw.LocalWorld(1).run(worker) == [True]


@pytest.mark.parametrize("nesterov", [False, True], ids=["plain", "nesterov"])
@pytest.mark.parametrize("size", [1, 3])
def test_at_ratio_1_it_is_sgd_with_momentum_and_weight_decay(nesterov, size):
    """To rounding: momentum of g and of the decay add up to that of their sum."""

    def worker(comm, ours):
        model = make_model()
        averager = tw.dgc(ratio=1.0, nesterov=nesterov) if ours else tw.Mean()
        handle = tw.compress_gradients(model, averager, comm=comm)
        parameters = [p for p in model.parameters() if p.requires_grad]
        options = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "nesterov": nesterov}
        optimizer = (tw.strategy.DGCSGD if ours else torch.optim.SGD)(parameters, **options)
        train(model, handle, optimizer, comm.rank, 5)
        handle.detach()
        return [p.detach() for p in parameters]

    a, b = tw.LocalWorld(size).run(worker, True)[0], tw.LocalWorld(size).run(worker, False)[0]
    for mine, expected in zip(a, b, strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=2e-6)


def test_a_plain_optimizer_steps_as_itself():
    """Without weight decay `DGCSGD` is gradient descent; its closure and mistakes are those of any optimizer."""
    w = nn.Parameter(torch.ones(2))
    optimizer = tw.strategy.DGCSGD([w, nn.Parameter(torch.ones(1))], lr=0.5)
    assert optimizer.step(lambda: (w.grad is None and w.sum().backward()) or 7) == 7
    assert torch.equal(w.detach(), torch.full((2,), 0.5))
    for options, message in (
        ({"lr": -1}, "lr must"),
        ({"weight_decay": -1}, "weight_decay"),
        ({"momentum": 1}, "below 1"),
    ):
        with pytest.raises(ValueError, match=message):
            tw.strategy.DGCSGD([w], **options)


# ---- the recipe ----


def test_the_recipe_is_its_parts():
    assert tw.dgc() == tw.Mean(tw.TopK(tw.schedule.GeometricWarmup(0.001, num=5)), tw.MomentumCorrection(0.9))
    assert tw.dgc(0.01, warmup_epochs=0) == tw.Mean(tw.TopK(0.01), tw.MomentumCorrection())
    full = tw.dgc(
        tw.schedule.Values((0.25, 0.01)),
        0.8,
        True,
        False,
        clip=tw.average.ClipByValue(1.0),
        bits=4,
        sample=0.01,
        min_ndim=0,
    )
    codec = tw.chain(tw.TopK(tw.schedule.Values((0.25, 0.01)), sample=0.01), tw.QSGD(bits=4))
    memory = tw.MomentumCorrection(0.8, nesterov=True, masking=False)
    assert full == tw.Mean(codec, memory, min_ndim=0, clip=tw.average.ClipByValue(1.0))
    for averager in (tw.dgc(), full):
        assert tw.parse(repr(averager)) == averager
    assert tw.parse("dgc(ratio=0.01, bits=4)") == tw.dgc(ratio=0.01, bits=4)
    assert tw.dgc(1000) == tw.dgc(0.001), "the original counts in factors of compression"
    assert tw.dgc(values="float16", warmup_epochs=0).codec == tw.chain(tw.TopK(0.001), tw.Cast("float16"))
    with pytest.raises(ValueError, match="give bits or values, got bits=4 and values='float16'"):
        tw.dgc(bits=4, values="float16")
    with pytest.raises(ValueError, match="warmup_epochs must be an integer"):
        tw.dgc(warmup_epochs=2.5)
    with pytest.raises(ValueError, match=r"dgc has no option 'ration'.*did you mean 'ratio'"):
        tw.parse("dgc(ration=0.1)")
