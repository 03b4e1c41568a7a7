"""A task that is not the lab's own: data, model, loss, metrics and optimizer that are defined here."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from helpers.interruptions import NEVER
from helpers.spawn import spawn
from torch import nn
from torch.nn import functional as F

import thinwire as tw
from thinwire.comm import ProcessGroupCommunicator
from thinwire.lab.overrides import overridden
from thinwire.lab.recipes import Task, TaskMethod
from thinwire.lab.train import RunConfig, evaluate_checkpoint
from thinwire.lab.train.data import Batch, Data, Dataset, Tensors, load
from thinwire.lab.train.loss import Loss
from thinwire.lab.train.models import Model, apply
from thinwire.lab.train.optimize import SGD, LearningRateSchedule, Optimizer
from thinwire.lab.train.run import loop
from thinwire.lab.train.step.training import prepare

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Table(Data):
    rows: int = 45
    sign: float = 1.0

    def load(self) -> Dataset:
        x = torch.randn(self.rows, 3, generator=torch.Generator().manual_seed(0))
        y = self.sign * (x[:, 0] - x[:, 1])
        return Numbers((x[:32], y[:32]), (x[32:], y[32:]))


class Numbers(Tensors):
    metric_names = ("loss", "mean_error")
    best_metric = "mean_error"
    lower_is_better = ("loss", "mean_error")
    num_sums = 3

    def sums(self, scores, labels):
        errors = scores[:, 0] - labels
        return torch.stack([errors.square().sum(), errors.abs().sum(), torch.tensor(float(len(labels)))])

    def metrics(self, sums_K):
        squares, errors, count = sums_K.tolist()
        return {"loss": squares / count, "mean_error": errors / count}


@dataclass(frozen=True)
class SquareOfError(Loss):
    scale: float = 1.0

    def __call__(self, scores, labels):
        return self.scale * F.mse_loss(scores[:, 0], labels)


@dataclass(frozen=True)
class Line(Model):
    bias: bool = True

    def build(self, num_classes: int) -> nn.Module:
        return nn.Linear(3, num_classes, bias=self.bias)


@dataclass(frozen=True)
class SlowBias(Optimizer):
    """SGD whose biases learn a tenth as fast."""

    learning_rate: float = 0.5
    weight_decay: float = 0.0

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            [{"params": [model.weight]}, {"params": [model.bias], "lr": self.learning_rate / 10}], lr=self.learning_rate
        )


PLAIN = SGD(0.2, 0.0, momentum=0.0, schedule=LearningRateSchedule(warmup_fraction=0.0, shape="constant"))
CONFIG = RunConfig(
    "own",
    data=Table(),
    model=Line(),
    loss=SquareOfError(),
    optimizer=PLAIN,
    workers=2,
    batch_size=4,
    epochs=3,
    log_every=1,
    keep=9,
)


def train_on_two(rank, folder, config):
    with ProcessGroupCommunicator() as comm:
        loop.run(config, folder, comm, NEVER)


def trained(folder, config: RunConfig) -> tuple[list[dict], dict]:
    folder.mkdir()
    spawn(2, train_on_two, folder, config)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return rows, json.loads((folder / "summary.json").read_text())


@pytest.mark.parametrize("strategy", ["Gradients(Mean())", "Gossip(Mix())"])
def test_a_run_of_an_own_task_has_its_metrics_everywhere(tmp_path, strategy):
    rows, summary = trained(tmp_path / "run", replace(CONFIG, strategy=strategy))
    tested = [row for row in rows if "test_mean_error" in row]
    assert len(tested) == 3 and summary["metric"] == "test_mean_error" and summary["lower_is_better"]
    assert summary["final"]["test_mean_error"] == tested[-1]["test_mean_error"] < tested[0]["test_mean_error"]
    assert "train_loss" in summary["final"] and "train_accuracy" not in summary["final"]
    with (tmp_path / "run" / "metrics.csv").open() as file:
        written = [float(row["test_mean_error"]) for row in csv.DictReader(file) if row["test_mean_error"]]
    assert written == pytest.approx([row["test_mean_error"] for row in tested])
    best = tmp_path / "run" / "checkpoints" / "best"
    assert best.resolve().name == f"step-{tested[-1]['step']:06d}", "the lowest error is the best"
    # Two workers share 13 test examples unevenly; the mean is that of one worker with all of them.
    mean = "mean_model_test_mean_error" if "Gossip" in strategy else "test_mean_error"
    assert evaluate_checkpoint(CONFIG, best)["test_mean_error"] == pytest.approx(tested[-1][mean])


def alone(config: RunConfig) -> Any:
    return tw.LocalWorld(1).run(lambda comm: prepare(config, load(config.data), CPU, comm))[0]


def test_groups_keep_their_multiples_of_the_learning_rate():
    training = alone(replace(CONFIG, optimizer=SlowBias()))
    training.learning_rate = 0.1
    assert [group["lr"] for group in training.optimizer.param_groups] == pytest.approx([0.1, 0.01])
    assert training.learning_rate == 0.1
    saved = alone(replace(CONFIG, optimizer=SlowBias()))
    saved.load_state(training.shared_state(), training.own_state())
    saved.learning_rate = 0.4
    assert [group["lr"] for group in saved.optimizer.param_groups] == pytest.approx([0.4, 0.04])


class Counter(nn.Module):
    """Its state is the number of batches that it has seen."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x, state=None):
        return self.layer(x), torch.ones(1) if state is None else state + 1


@dataclass(frozen=True)
class Counting(Model):
    def build(self, num_classes: int) -> nn.Module:
        return Counter()


@pytest.mark.parametrize("in_order", [False, True])
def test_only_data_in_order_carry_the_state_of_a_recurrent_model(in_order):
    x, y = torch.ones(8, 3), torch.zeros(8, dtype=torch.int64)
    data = Tensors((x, y), (x, y), num_classes=2)
    data.in_order = in_order
    config = RunConfig("own", model=Counting(), optimizer=PLAIN)

    def worker(comm):
        training = prepare(config, data, CPU, comm)
        for _ in range(3):
            training.step([Batch((x,), y)])
        return training.model, training.carried

    ((model, carried),) = tw.LocalWorld(1).run(worker)
    assert carried == (torch.tensor([3.0]) if in_order else None)
    states = []
    model.register_forward_hook(lambda module, inputs, output: states.append(output[1].item()))
    data.evaluate(model, 0, 1, 4)
    assert states == ([1.0, 2.0] if in_order else [1.0, 1.0])


def test_own_kinds_are_chosen_by_name_and_come_back_from_a_saved_configuration():
    digits = RunConfig("digits")
    changed = overridden(
        digits, {"data.kind": "Table", "model.kind": "Line", "model.bias": False, "loss.kind": "SquareOfError"}
    )
    assert (changed.data, changed.model, changed.loss) == (Table(), Line(bias=False), SquareOfError())
    assert changed.as_dict()["loss"] == {"kind": "SquareOfError", "scale": 1.0}


def test_a_method_without_a_strategy_has_that_of_its_task():
    methods = {"": TaskMethod("as it is"), "dense": TaskMethod("dense", "Gradients(Mean())")}
    made = Task("own", replace(CONFIG, strategy="Gossip(Mix())"), methods).recipes()
    assert (made["own"].config.strategy, made["own-dense"].config.strategy) == ("Gossip(Mix())", "Gradients(Mean())")


# Mistakes


class NoConfig:
    def load(self):
        return None


@dataclass(frozen=True)
class WithFunction(Data):
    transform: Any = abs

    def load(self):
        return TensorsOfNothing()


class TensorsOfNothing(Tensors):
    def __init__(self):
        self.num_examples = 0


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ({"data": NoConfig()}, "data must be a frozen dataclass derived from Data, got <"),
        ({"data": Table}, "data must be a frozen dataclass derived from Data, got <class"),
        ({"model": nn.Linear(1, 1)}, "model must be a frozen dataclass derived from Model, got Linear"),
        ({"loss": F.mse_loss}, "loss must be a frozen dataclass derived from Loss, got <function"),
        ({"optimizer": torch.optim.SGD}, "optimizer must be a frozen dataclass derived from Optimizer, got <class"),
    ],
)
def test_a_part_that_is_no_configuration_is_refused_at_once(part, text):
    with pytest.raises(ValueError, match=text):
        replace(CONFIG, **part)


def test_a_field_whose_text_differs_between_processes_is_refused():
    with pytest.raises(
        ValueError, match="data.transform must be text, a number, a path, or a list or table of these, got"
    ):
        replace(CONFIG, data=WithFunction()).as_dict()


@dataclass(frozen=True)
class Loading(Data):
    kind: str = "nothing"

    def load(self):
        x, y = torch.ones(4, 3), torch.ones(4)
        data: Any = {"nothing": lambda: [x, y], "empty": TensorsOfNothing, "unnamed": lambda: Unnamed((x, y), (x, y))}[
            self.kind
        ]()
        return data


class Unnamed(Tensors):
    metric_names = ("loss", "f1")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("nothing", r"Loading.load\(\) must return a Dataset, got list"),
        ("empty", "TensorsOfNothing.num_examples must be a number from 1 on, got 0"),
        ("unnamed", "Unnamed.metric_names must have 'accuracy', got"),
    ],
)
def test_a_data_set_that_the_loop_cannot_use_is_refused_before_the_training(kind, text):
    with pytest.raises(ValueError, match=text):
        load(Loading(kind))


def test_mistakes_of_a_data_set_are_named():
    x, y = torch.ones(4, 3), torch.ones(4)
    with pytest.raises(
        ValueError, match=r"Tensors has labels \(4,\) of torch.float32 for scores \(4, 1\), which are no classes"
    ):
        Tensors((x, y), (x, y)).sums(x[:, :1], y)
    with pytest.raises(ValueError, match=r"Unnamed has labels"):
        Unnamed((x, y), (x, y)).checked_sums(x[:, :1], y)
    data = Numbers((x, y), (x, y))
    data.num_sums = 4
    with pytest.raises(ValueError, match=r"Numbers.sums must return 4 sums \(num_sums\), got a tensor \(3,\)"):
        data.checked_sums(x[:, :1], y)
    with pytest.raises(
        ValueError, match=r"inputs of a batch are a tuple of tensors, got Tensor; write Batch\(\(x,\), labels\)"
    ):
        Batch(x, y).to("cpu")
    with pytest.raises(ValueError, match="there are no test examples"):
        Tensors((x, y), (x[:0], y[:0]))
    with pytest.raises(ValueError, match=r"the training examples need as many labels as inputs, got \[4, 3\]"):
        Tensors((x, y[:3]), (x, y))


class Returning(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, x):
        return self.value


@pytest.mark.parametrize(
    ("value", "found"),
    [({"logits": 1}, "a dict"), ((torch.ones(1), 1, 2), "a tuple of 3"), (((1,), 2), "a tuple of 2")],
)
def test_a_model_that_returns_no_scores_is_named(value, found):
    with pytest.raises(
        ValueError, match=rf"must return scores, a tensor, or \(scores, state\) if it is recurrent; got {found}"
    ):
        apply(Returning(value), (torch.ones(1),))


@dataclass(frozen=True)
class Building(Model):
    what: str

    def build(self, num_classes: int) -> nn.Module:
        made: Any = {"nothing": None, "frozen": nn.Linear(3, 1).requires_grad_(False)}[self.what]
        return made


@dataclass(frozen=True)
class NoOptimizer(Optimizer):
    learning_rate: float = 0.5
    weight_decay: float = 0.0

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        made: Any = None
        return made


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ({"model": Building("nothing")}, "Building.build must return an nn.Module, got None"),
        ({"model": Building("frozen")}, "the model of Building has no parameter that is trained"),
        ({"optimizer": NoOptimizer()}, "NoOptimizer.build must return a torch.optim.Optimizer, got None"),
    ],
)
def test_what_is_built_is_checked_before_the_training(part, text):
    with pytest.raises(ValueError, match=text):
        alone(replace(CONFIG, **part))
