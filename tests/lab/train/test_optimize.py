"""Optimizers, learning rates and the loss, held to their closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from thinwire.comm import LocalWorld
from thinwire.lab.train import RunConfig
from thinwire.lab.train.data import IGNORE, Batch
from thinwire.lab.train.loss import CrossEntropy
from thinwire.lab.train.models import CIFARResNet
from thinwire.lab.train.optimize import DGCSGD, SGD, Adam, LearningRateSchedule, set_learning_rate
from thinwire.lab.train.step.training import Training


def rates_of(shape: str, num_steps: int = 100, num_workers: int = 1, **fields) -> list[float]:
    return [LearningRateSchedule(shape=shape, **fields).at(step, num_steps, num_workers) for step in range(num_steps)]


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine", "steps", "inverse_sqrt"])
def test_warm_up_is_a_line_that_ends_at_the_full_rate(shape):
    rates = rates_of(shape, warmup_fraction=0.2)
    assert rates[:20] == pytest.approx([(i + 1) / 20 for i in range(20)])
    assert max(rates) == 1 and min(rates) >= 0


def test_linear_cosine_and_constant_go_where_they_say():
    progress = [i / 80 for i in range(80)]
    assert rates_of("linear", warmup_fraction=0.2)[20:] == pytest.approx([1 - p for p in progress])
    assert rates_of("cosine", warmup_fraction=0.2)[20:] == pytest.approx(
        [math.cos(math.pi * p / 2) ** 2 for p in progress]
    )
    assert rates_of("constant", warmup_fraction=0.2)[20:] == [1] * 80


def test_steps_drop_where_epochs_end():
    """90 epochs of 7 steps, /10 after 30, 60 and 80: the ImageNet schedule."""
    rates = rates_of("steps", num_steps=630, warmup_fraction=5 / 90)
    by_epoch = [rates[7 * epoch : 7 * epoch + 7] for epoch in range(90)]
    for epoch in range(5, 90):
        expected = 0.1 ** sum(epoch >= drop for drop in (30, 60, 80))
        assert by_epoch[epoch] == pytest.approx([expected] * 7)
    assert rates_of("steps", warmup_fraction=0, drops=(0.5,), drop_factor=0.5) == [1] * 50 + [0.5] * 50


def test_inverse_square_root_is_the_transformers():
    """`d^-0.5 min(s^-0.5, s w^-1.5)` with a width d of 512 and w of 4000, at the rate `(d w)^-0.5`."""
    adam = Adam(learning_rate=(512 * 4000) ** -0.5, schedule=LearningRateSchedule(4000 / 100_000, "inverse_sqrt"))
    for s in (1, 100, 3999, 4000, 4001, 50_000, 100_000):
        paper = 512**-0.5 * min(s**-0.5, s * 4000**-1.5)
        assert adam.learning_rate_at(s - 1, 100_000) == pytest.approx(paper)


def test_scaled_by_workers_it_rises_from_one_workers_rate_to_that_of_all():
    rates = rates_of("cosine", num_workers=8, warmup_fraction=0.2, scale_by_workers=True)
    assert rates[:20] == pytest.approx([1 + 7 * (i + 1) / 20 for i in range(20)])
    alone = rates_of("cosine", warmup_fraction=0.2)
    assert rates[20:] == pytest.approx([8 * rate for rate in alone[20:]])
    assert rates_of("cosine", num_workers=8) == rates_of("cosine"), "unless asked for, workers change nothing"


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_is_its_equation(nesterov):
    model = nn.Linear(3, 2, bias=False).double()
    x, v = model.weight.detach().clone(), torch.zeros(2, 3, dtype=torch.float64)
    optimizer = SGD(0.3, weight_decay=0.01, momentum=0.8, nesterov=nesterov).build(model)
    for i in range(4):
        model.weight.grad = torch.full_like(x, i - 1.5)
        pulled = model.weight.grad + 0.01 * x
        v = 0.8 * v + pulled
        x = x - 0.3 * (pulled + 0.8 * v if nesterov else v)
        optimizer.step()
        torch.testing.assert_close(model.weight.detach(), x)


def test_the_rate_in_the_loss_multiplies_gradients():
    """With learning rate r, an exact mean and no momentum: x - r (r g) instead of x - r g; r counts at each step."""

    def moved(comm, rate_in_loss):
        model = nn.Linear(2, 2, bias=False)
        config = RunConfig("digits", optimizer=SGD(0.5, 0.0, momentum=0.0, rate_in_loss=rate_in_loss))
        optimizer, changes = config.optimizer.build(model), []
        strategy = config.parsed_strategy().attach(model, optimizer, comm=comm)
        training = Training(config, model, model, optimizer, torch.amp.GradScaler(enabled=False), strategy)
        for rate in (0.5, 0.125):
            with torch.no_grad():
                model.weight.zero_()
            set_learning_rate(optimizer, rate, [1.0])
            training.step([Batch((torch.tensor([[1.0, 2.0]]),), torch.tensor([i])) for i in (0, 0)])
            changes.append(model.weight.detach().clone())
        strategy.detach()
        return changes

    (plains,), (scaleds,) = LocalWorld(1).run(moved, False), LocalWorld(1).run(moved, True)
    for plain, scaled, rate in zip(plains, scaleds, (0.5, 0.125), strict=True):
        assert plain.abs().max() > 0.05 and torch.equal(scaled, rate * plain)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adam_is_its_equation(weight_decay):
    model = nn.Linear(3, 2, bias=False).double()
    x = model.weight.detach().clone()
    m, v = torch.zeros_like(x), torch.zeros_like(x)
    optimizer = Adam(0.02, weight_decay).build(model)
    for step in range(1, 5):
        g = torch.full_like(x, step - 2.5)
        m, v = 0.9 * m + 0.1 * g, 0.98 * v + 0.02 * g * g
        x = x - 0.02 * (m / (1 - 0.9**step) / ((v / (1 - 0.98**step)).sqrt() + 1e-9) + weight_decay * x)
        model.weight.grad = g
        optimizer.step()
        torch.testing.assert_close(model.weight.detach(), x)


def test_weight_decay_spares_norms_and_biases_unless_told_otherwise():
    model = CIFARResNet(8).build()
    decayed, spared = SGD(weight_decay=0.1).groups(model)
    names = {id(p): name for name, p in model.named_parameters()}
    vectors = {name for name, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)}
    assert {names[id(p)].rsplit(".", 1)[0] for p in spared["params"]} == {*vectors, "6"}  # 6: the linear layer's bias
    assert len(decayed["params"]) + len(spared["params"]) == len(names)
    (everything,) = SGD(weight_decay=0.1, undecayed=()).groups(model)
    assert len(everything["params"]) == len(names) and everything["weight_decay"] == 0.1


def test_a_step_without_gradient_shrinks_what_decays_and_leaves_the_rest():
    model = nn.Linear(2, 2)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = SGD(learning_rate=1.0, weight_decay=0.25, momentum=0.0).build(model)
    set_learning_rate(optimizer, 0.5, [1.0, 1.0])
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), before[0] * (1 - 0.5 * 0.25))
    assert torch.equal(model.bias, before[1])


@pytest.mark.parametrize("e", [0.0, 0.1, 0.5])
def test_label_smoothing_is_its_equation(e):
    torch.manual_seed(0)
    scores, labels = torch.randn(3, 4, 7, dtype=torch.float64), torch.randint(7, (3, 4))
    labels[0, 1] = labels[2, 3] = IGNORE
    losses = []
    for row, label in zip(scores.flatten(0, 1), labels.flatten().tolist(), strict=True):
        if label != IGNORE:
            log_p = row - row.logsumexp(0)
            losses.append(-(1 - e) * log_p[label] - e / 7 * log_p.sum())
    torch.testing.assert_close(CrossEntropy(e)(scores, labels), torch.stack(losses).mean())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LearningRateSchedule(shape="triangle"), "optimizer.schedule.shape must be one of"),
        (
            lambda: LearningRateSchedule(warmup_fraction=1.5),
            "optimizer.schedule.warmup_fraction must be at least 0 and at most 1, got 1.5",
        ),
        (lambda: LearningRateSchedule(drops=(0.6, 0.3)), "optimizer.schedule.drops must ascend between 0 and 1"),
        (lambda: SGD(learning_rate=0), "optimizer.learning_rate must be above 0"),
        (lambda: SGD(momentum=1.0), "optimizer.momentum must be at least 0 and below 1"),
        (lambda: SGD(weight_decay=-1), "optimizer.weight_decay must be at least 0"),
        (lambda: Adam(beta2=1.0), "optimizer.beta2 must be at least 0 and below 1"),
        (lambda: Adam(eps=0), "optimizer.eps must be above 0"),
        (lambda: CrossEntropy(1.0), "loss.label_smoothing must be at least 0 and below 1"),
    ],
)
def test_values_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "config", [LearningRateSchedule(), SGD(0.1, momentum=0.5), Adam(), CrossEntropy(0.1)], ids=repr
)
def test_repr_rebuilds_the_configuration(config):
    assert eval(repr(config)) == config


def test_points_are_joined_by_straight_lines_and_two_at_once_make_a_jump():
    schedule = LearningRateSchedule(0.0, "points", points=((0, 1), (0.5, 3), (0.5, 1), (1, 0)))
    assert [schedule.at(step, 8) for step in range(8)] == [1, 1.5, 2, 2.5, 1, 0.75, 0.5, 0.25]


@pytest.mark.parametrize(
    "points",
    [
        ((0, 1), (1, float("nan"))),
        ((0, 1), (1, -1)),
        (),
        ((0, 1),),
        ((0.1, 1), (1, 1)),
        ((0, 1), (0.5, 1)),
        ((0, 1), (0.7, 1), (0.6, 1), (1, 1)),
    ],
)
def test_points_go_from_start_to_end_and_are_rates(points):
    with pytest.raises(ValueError, match="points must ascend from 0 to 1"):
        LearningRateSchedule(shape="points", points=points)


def test_the_optimizer_for_gradients_that_carry_momentum_has_none_of_its_own():
    model = torch.nn.Linear(2, 3)
    optimizer = DGCSGD(0.1, 1e-4, nesterov=True).build(model)
    assert type(optimizer).__module__.startswith("thinwire.strategy")
    assert [
        (group["weight_decay"], group["decay_momentum"], group["nesterov"]) for group in optimizer.param_groups
    ] == [
        (1e-4, 0.9, True),
        (0.0, 0.9, True),
    ]
    with pytest.raises(ValueError, match="momentum"):
        DGCSGD(momentum=1.0)


@pytest.mark.parametrize(
    ("undecayed", "spared"),
    [
        (("vectors",), {"0.bias", "1.weight", "1.bias", "2.bias"}),
        (("norms",), {"1.weight", "1.bias"}),
        (("2.*", "0.b*"), {"2.weight", "2.bias", "0.bias"}),
        ((), set()),
    ],
)
def test_weight_decay_spares_what_undecayed_names(undecayed, spared):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2))
    decay = {p: group["weight_decay"] for group in SGD(undecayed=undecayed).groups(model) for p in group["params"]}
    expected = {name: 0.0 if name in spared else SGD().weight_decay for name, _ in model.named_parameters()}
    assert {name: decay[p] for name, p in model.named_parameters()} == expected


def test_a_pattern_that_names_no_parameter_is_refused():
    with pytest.raises(ValueError, match=r"undecayed: no parameter's name matches 'layer9\.\*'"):
        SGD(undecayed=("layer9.*",)).groups(nn.Linear(2, 2))
