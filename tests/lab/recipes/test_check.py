"""The check of a recipe passes what the lab has, and names what is wrong with others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from helpers import tiny
from torch import nn

from thinwire.lab.recipes import check_recipe
from thinwire.lab.train import RunConfig
from thinwire.lab.train.data import Batch, Data, Tensors
from thinwire.lab.train.loss import Loss
from thinwire.lab.train.models import LSTMLanguageModel, Model, Transformer

WRONG = {
    "right": "",
    "random": r"Wrong.load\(\) gives other data each time; let its random choices follow from a fixed seed",
    "noise": "Broken.batch gives other batches for the same indices; draw random numbers from its generator alone",
    "all": "the test batches of 2 workers do not add up to the test set of one: Broken has sums",
    "means": r"the test batches of \d workers do not add up to the test set of one: Broken has sums",
    "names": r"Broken.metrics returns \['acc', 'loss'\], and metric_names are \('loss', 'accuracy'\)",
    "tensors": r"Broken.metrics must return numbers, got {'loss': 'Tensor', 'accuracy': 'Tensor'}; tensors have `item\(\)`",
    "empty": "the test set of Broken has no label that counts",
}


@dataclass(frozen=True)
class Wrong(Data):
    what: str = "right"

    def load(self):
        x = torch.randn(30, 3, generator=torch.Generator().manual_seed(0))
        if self.what == "random":
            x = torch.randn(30, 3)
        return Broken((x[:17], (x[:17, 0] > 0).long()), (x[17:], (x[17:, 0] > 0).long()), 2, self.what)


class Broken(Tensors):
    def __init__(self, train, test, num_classes, what):
        super().__init__(train, test, num_classes)
        self.what, self.labels = what, None

    def batch(self, indices, generator, epoch):
        (x,), y = super().batch(indices, generator, epoch)
        return Batch((x + torch.rand(()) if self.what == "noise" else x,), y)

    def test_batches(self, rank, size, batch_size):
        if self.what != "empty":
            yield from super().test_batches(*((0, 1) if self.what == "all" else (rank, size)), batch_size)

    def sums(self, scores, labels):
        found = super().sums(scores, labels)
        return found / found[-1] if self.what == "means" else found

    def metrics(self, sums_K):
        found = super().metrics(sums_K)
        if self.what == "tensors":
            return {name: torch.tensor(value) for name, value in found.items()}
        return {"loss": found["loss"], "acc": found["accuracy"]} if self.what == "names" else found


@dataclass(frozen=True)
class Linear(Model):
    def build(self, num_classes: int) -> nn.Module:
        return nn.Linear(3, num_classes)


@dataclass(frozen=True)
class Vector(Loss):
    what: str = "each"

    def __call__(self, scores, labels):
        return {"each": scores[:, 0], "infinite": scores.sum() / 0, "other": torch.zeros((), requires_grad=True)}[
            self.what
        ]


CONFIG = RunConfig("wrong", data=Wrong(), model=Linear(), batch_size=4)


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_with_data_is_named(what):
    config = replace(CONFIG, data=Wrong(what))
    if what == "right":
        check_recipe(config)
        return
    with pytest.raises(ValueError, match=WRONG[what]):
        check_recipe(config)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("each", "the loss of a batch must be a finite scalar tensor, got tensor"),
        ("infinite", "the loss of a batch must be a finite scalar tensor, got tensor"),
        ("other", "the loss gives no parameter of the optimizer a gradient"),
    ],
)
def test_what_is_wrong_with_a_loss_is_named(what, text):
    with pytest.raises(ValueError, match=text):
        check_recipe(replace(CONFIG, loss=Vector(what)))


def test_the_labs_own_kinds_pass(tmp_path):
    models: dict[str, Any] = {
        "text": (tiny.text(tmp_path / "text", context=8), LSTMLanguageModel(width=8, layers=1)),
        "pairs": (tiny.pairs(tmp_path / "pairs"), Transformer(width=16, heads=2, layers=1)),
    }
    for data, model in models.values():
        check_recipe(RunConfig("own", data=data, model=model, batch_size=2))
