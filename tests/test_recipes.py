"""Every recipe: its name, its twin, its averager, and what it says of itself; a few of them take real steps."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from thinwire.algorithm import Algorithm
from thinwire.recipes import SMALL, Method, Task, recipes, tasks
from thinwire.train import RunConfig
from thinwire.train.optimize import DGCSGD

ALL = recipes()


@pytest.mark.parametrize("name", ALL)
def test_every_recipe_is_a_configuration_that_knows_its_name(name):
    config = ALL[name].config
    assert config.recipe == name and re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)
    assert ALL[name].about and "\n" not in ALL[name].about
    assert isinstance(config.parsed_averager(), Algorithm)
    json.dumps(config.as_dict())


@pytest.mark.parametrize("task", tasks(), ids=lambda task: f"{task.full.recipe} {task.title}")
def test_every_task_names_its_paper_and_twins_are_the_same_task(task):
    if task.small is None:
        return
    assert task.full.recipe == task.small.recipe
    assert re.search(r"\d{4}\.\d{5}", task.title), "title without an arXiv number"
    assert type(task.full.data) is type(task.small.data)
    assert type(task.full.model) is type(task.small.model)
    for end in task.methods:
        assert ALL[task.name(end) + SMALL].config.parsed_averager().__class__ is (
            ALL[task.name(end)].config.parsed_averager().__class__
        )


def test_where_the_averager_applies_momentum_the_optimizer_does_not():
    averager = "Mean(TopK(0.01), MomentumCorrection(0.9, nesterov=True))"
    full = RunConfig("task")
    config = Task("a task", full, {"dgc": Method("sparse", averager)}).recipes()["task-dgc"].config
    assert isinstance(config.optimizer, DGCSGD) and config.optimizer.nesterov
    assert config.optimizer.schedule == full.optimizer.schedule
    other = replace(full, optimizer=replace(full.optimizer, momentum=0.8))
    with pytest.raises(ValueError, match="must have the momentum of"):
        Task("a task", other, {"dgc": Method("sparse", averager)}).recipes()
