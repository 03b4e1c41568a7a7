"""The strategy of a user who names none, and warnings about configurations that are rarely meant."""

from __future__ import annotations

import warnings
from contextlib import closing

import pytest
import torch
import torch.distributed as dist
from helpers.spawn import spawn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.comm import ElasticCommunicator, Lighthouse
from thinwire.strategy import advice

EF = tw.ErrorFeedback()


@pytest.fixture
def nothing_said(monkeypatch):
    """A process that has logged no choice yet."""
    monkeypatch.setattr(advice, "_LOGGED", set())


def warnings_of(
    averager: tw.average.Averager, optimizer=torch.optim.SGD, steps: int = 1, epoch: int | None = None
) -> list[str]:
    """What one worker is warned of while it trains some steps."""

    def worker(comm):
        model = nn.Linear(20, 10)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            with tw.compress_gradients(model, averager, comm=comm) as handle:
                if epoch is not None:
                    handle.set_epoch(epoch)
                ours = optimizer(model.parameters(), lr=0.1)
                for _ in range(steps):
                    model(torch.ones(4, 20)).square().mean().backward()
                    ours.step()
        return [str(w.message) for w in seen if w.category is UserWarning]

    return tw.LocalWorld(1).run(worker)[0]


@pytest.mark.parametrize("door", [lambda m, c: tw.compress_gradients(m, comm=c), lambda m, c: tw.attach(m, comm=c)])
def test_without_a_strategy_gradients_go_in_four_bits_and_rank_0_says_so_once(door, nothing_said, capsys):
    def worker(comm):
        with door(nn.Linear(2, 2), comm) as handle, door(nn.Linear(2, 2), comm):  # such as a GAN
            return handle.strategy

    assert tw.LocalWorld(2).run(worker) == [tw.Gradients(tw.Mean(tw.QSGD(bits=4)))] * 2
    said = capsys.readouterr().err.splitlines()
    assert said == ["thinwire: no strategy was given; for 2 workers it takes Gradients(Mean(QSGD(bits=4)))"]
    assert tw.parse(said[0].split("takes ")[1]) == tw.Gradients(tw.Mean(tw.QSGD(bits=4)))


def test_another_choice_is_said_too_with_what_it_rests_on(nothing_said, capsys):
    def worker(comm):
        for optimizer in (torch.optim.AdamW, torch.optim.Muon, torch.optim.SGD):
            model = nn.Linear(2, 2, bias=False)
            tw.attach(model, optimizer(model.parameters(), lr=0.1), comm=comm).detach()

    tw.LocalWorld(2).run(worker)
    assert capsys.readouterr().err.splitlines() == [
        "thinwire: no strategy was given; for 2 workers under AdamW it takes Gradients(Mean(QSGD(bits=4)))",
        "thinwire: no strategy was given; for 2 workers under Muon it takes "
        "Gradients(Mean(QSGD(bits=8), exchange='scatter_reduce'))",
    ]


def choices(**workers):
    """The averagers of both doors. `ddp` is the process group of a model in DDP."""
    group = workers.pop("ddp", None)

    def model():
        plain = nn.Linear(2, 2)
        return plain if group is None else DistributedDataParallel(plain, process_group=group)

    first, second = model(), model()
    with tw.compress_gradients(first, **workers) as handle:
        averagers = [handle.averager]
    with tw.attach(second, torch.optim.SGD(second.parameters()), **workers) as handle:
        return [*averagers, handle.averager]


def test_one_worker_stays_dense_because_it_sends_nothing(nothing_said, capsys):
    assert tw.LocalWorld(1).run(lambda comm: choices(comm=comm)) == [[tw.Mean(), tw.Mean()]]
    said = capsys.readouterr().err.splitlines()
    assert said == ["thinwire: no strategy was given; for 1 worker it takes Gradients(Mean())"]


def group_worker(comm):
    """Workers are those of the DDP's group, or of `replicas`, or all."""
    alone = [dist.new_group([rank]) for rank in range(comm.size)][comm.rank]
    one, several = [tw.Mean()] * 2, [tw.Mean(tw.QSGD(bits=4))] * 2
    assert choices() == several
    assert choices(ddp=alone) == one
    assert choices(ddp=dist.group.WORLD) == several
    assert choices(replicas=alone) == one
    assert choices(replicas=dist.init_device_mesh("cpu", (comm.size,))) == several


def test_the_choice_counts_the_workers_that_will_average():
    spawn(2, group_worker)


def test_a_worker_that_others_may_join_compresses(nothing_said, capsys):
    with closing(Lighthouse(1, "127.0.0.1")) as lighthouse, ElasticCommunicator(lighthouse.address, 0, 1) as comm:
        assert choices(comm=comm) == [tw.Mean(tw.QSGD(bits=4))] * 2
    assert "for workers that come and go it takes" in capsys.readouterr().err


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Muon, tw.strategy.MuonAdamW])
def test_the_choice_follows_the_optimizer_and_sends_a_third_of_dense_gradients_or_less(optimizer, size):
    def worker(comm):
        model = nn.Linear(256, 256, bias=False)
        ours = optimizer(model.parameters(), lr=0.1)
        with tw.attach(model, ours, comm=comm) as handle:
            before = handle.ledger.snapshot()
            model(torch.ones(4, 256)).square().mean().backward()
            sent = handle.ledger.since(before)
            return handle.strategy, sent.dense_fp32_bytes / sent.bytes_sent

    (strategy, times), *_ = tw.LocalWorld(size).run(worker)
    bits = 4 if optimizer is torch.optim.AdamW else 8
    assert strategy.averager.codec == tw.QSGD(bits=bits)
    assert times >= 3


@pytest.mark.parametrize(
    "averager, optimizer, expected",
    [
        (
            tw.Mean(tw.TopK(0.1)),
            torch.optim.SGD,
            ["loses what TopK(ratio=0.1) does not send; write Mean(TopK(ratio=0.1), Error"],
        ),
        (tw.ByName({"*": tw.Mean(tw.TopK(0.1))}), torch.optim.SGD, ["loses what TopK(ratio=0.1) does not send"]),
        (
            tw.Mean(tw.TopK(1), EF),
            torch.optim.SGD,
            ["TopK(ratio=1) sends every element; write TopK(0.01) for 1 % of them"],
        ),
        (
            tw.Mean(tw.TopK(0.1), EF),
            torch.optim.AdamW,
            ["AdamW trains worse by Mean(TopK(ratio=0.1), ErrorFeedback()) than"],
        ),
        (tw.Mean(tw.TopK(0.1), EF), torch.optim.SGD, []),
        (tw.Mean(tw.QSGD(bits=4)), torch.optim.AdamW, []),
        (tw.Mean(), torch.optim.AdamW, []),
        (
            tw.Mean(tw.QSGD(bits=4)),
            tw.strategy.MuonAdamW,
            [
                "MuonAdamW trains language models worse by QSGD(bits=4) than by dense gradients; Mean(QSGD(bits=8), exchange="
            ],
        ),
        (tw.Mean(tw.QSGD(bits=8), exchange="scatter_reduce"), tw.strategy.MuonAdamW, []),
        (tw.Mean(tw.Cast()), torch.optim.SGD, []),
        (
            tw.Mean(tw.RandomK(0.1, shared=True)),
            torch.optim.SGD,
            ["loses what RandomK(ratio=0.1, shared=True) does not send"],
        ),
        (tw.Mean(tw.SignSGD()), torch.optim.SGD, []),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_what_is_rarely_meant_is_one_warning(averager, optimizer, expected):
    got = warnings_of(averager, optimizer, steps=2)
    assert len(got) == len(expected) and all(text in line for text, line in zip(expected, got, strict=True)), got


def test_a_warm_up_by_epochs_asks_for_the_epoch_after_many_steps(monkeypatch):
    monkeypatch.setattr(advice, "STEPS_WITHOUT_EPOCH", 3)
    assert warnings_of(tw.dgc(0.1), steps=2) == []
    (line,) = warnings_of(tw.dgc(0.1), steps=5)
    assert "call handle.set_epoch(epoch)" in line
    assert warnings_of(tw.dgc(0.1), steps=5, epoch=0) == []
    assert warnings_of(tw.sparse(0.1), steps=5) == []


def test_only_rank_0_warns():
    def worker(comm):
        tw.compress_gradients(nn.Linear(2, 2), tw.Mean(tw.TopK(0.1)), comm=comm).detach()

    with pytest.warns(UserWarning) as seen:
        tw.LocalWorld(3).run(worker)
    assert len([w for w in seen if "loses what" in str(w.message)]) == 1


def accumulated_alone(model, optimizers, handle):
    with handle.no_sync():
        model(torch.ones(1, 2)).sum().backward()


def differentiated(model, optimizers, handle):
    model.weight.grad = torch.autograd.grad(model(torch.ones(1, 2)).sum(), model.weight)[0]


def accumulated(model, optimizers, handle):
    accumulated_alone(model, optimizers, handle)
    model(torch.ones(1, 2)).sum().backward()


def stepped_by_another(model, optimizers, handle):
    accumulated(model, optimizers, handle)
    optimizers[1].step()


@pytest.mark.parametrize(
    "differentiate, drifts",
    [(accumulated_alone, True), (differentiated, True), (accumulated, False), (stepped_by_another, False)],
)
@pytest.mark.parametrize("first", [0, 1])
def test_steps_on_gradients_that_nothing_has_averaged_are_warned_of_once(differentiate, drifts, first):
    def worker(comm):
        model = nn.Linear(2, 2)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
        with tw.compress_gradients(model, tw.Mean(), comm=comm) as handle:
            for step in range(first + 2):
                (accumulated if step < first else differentiate)(model, optimizers, handle)
                optimizers[0].step()
                optimizers[0].zero_grad()
                optimizers[0].step()  # without gradients nothing happens

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        tw.LocalWorld(2).run(worker)
    assert sum("SGD steps, and no backward pass has averaged" in str(w.message) for w in seen) == drifts


@pytest.mark.parametrize(
    "parts, workers, expected",
    [
        (
            ["body"],
            2,
            ["Gradients: 2 of the 6 parameters of SGD are attached to no strategy, and unless something else aver"],
        ),
        (["body", "head"], 2, []),  # a strategy for each
        (["body"], 1, []),
    ],
)
def test_parameters_of_the_optimizer_that_nothing_averages_are_warned_of(parts, workers, expected):
    def worker(comm):
        model = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 1), "frozen": nn.Linear(2, 1)})
        model["frozen"].requires_grad_(False)
        optimizer = torch.optim.SGD([*model["body"].parameters(), *model["head"].parameters()], lr=0.1)
        optimizer.add_param_group({"params": model["frozen"].parameters()})
        handles = [tw.compress_gradients(model[part], tw.Mean(), comm=comm) for part in parts]
        for _ in range(2):
            model["head"](model["body"](torch.ones(1, 2))).sum().backward()
            optimizer.step()
        for handle in handles:
            handle.detach()

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        tw.LocalWorld(workers).run(worker)
    said = [str(w.message) for w in seen]
    assert len(said) == len(expected) and all(text in line for text, line in zip(expected, said, strict=True)), said


def test_the_warm_up_of_sparse_counts_steps_and_bytes():
    def worker(comm):
        model, sent = nn.Linear(100, 100, bias=False), []
        with tw.compress_gradients(model, tw.sparse(0.01, warmup_steps=3), comm=comm) as handle:
            for _ in range(5):
                before = handle.ledger.bytes_sent
                model(torch.randn(4, 100)).square().mean().backward()
                sent.append(handle.ledger.bytes_sent - before)
        return sent

    ratios = [0.25 * (0.01 / 0.25) ** (step / 4) for step in (1, 2, 3)] + [0.01, 0.01]
    expected = [tw.chain(tw.TopK(ratio), tw.QSGD(bits=4)).nbytes(10_000) for ratio in ratios]
    assert tw.LocalWorld(2).run(worker) == [expected] * 2


def test_an_optimizer_in_the_place_of_the_strategy_is_one_line():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"SGD is an optimizer; it comes before the strategy: attach") as caught:
        tw.attach(model, tw.Gradients(tw.Mean()), torch.optim.SGD(model.parameters(), lr=0.1))
    assert "\n" not in str(caught.value)
