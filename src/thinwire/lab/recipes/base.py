"""The definition of a recipe: a run's complete configuration under a name.

A module of this package has `TASKS`. A task is a model and its data, with the methods that train it. For every method, a task
makes a recipe `<task>-<method>` as published, and `<task>-<method>-small`, which takes minutes on two cores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from ...algorithm import require
from ...average import Mean
from ..train import RunConfig
from ..train.optimize import DGCSGD, SGD

SMALL = "-small"


@dataclass(frozen=True)
class Recipe:
    """A line about a run: model, data, source and what is sent; and what makes its configuration."""

    about: str
    make: Callable[[], RunConfig]

    @cached_property
    def config(self) -> RunConfig:
        """The run's configuration. It is made when it is first read: a command reads one of hundreds.

        Raises:
            ValueError: the recipe is wrong.
        """
        return self.make()


@dataclass(frozen=True)
class TaskMethod:
    """A method of averaging for a task.

    Args:
        about: a line: what is sent, and the paper (arXiv number) unless it is the task's own.
        strategy: what is averaged, when and how; None => that of the task's configuration.
        small_strategy: that of the small recipe, such as one with earlier updates; None => the same.
        changes: fields of `RunConfig` that this method changes.
        small_changes: the same for the small recipe, which ignores `changes`.
    """

    about: str
    strategy: str | None = None
    small_strategy: str | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    small_changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """A model, its data, and the methods that train it.

    Args:
        title: heading of its recipes: model, data, and the paper of the hyperparameters (arXiv number).
        full: the hyperparameters as published; its `recipe` begins the names.
        methods: by the last part of the name; "dense" is the baseline.
        small: configuration of the small recipes, for minutes on two cores; None if the task is small already.

    Example:
        >>> from thinwire.lab.train import RunConfig
        >>> full, small = RunConfig("digits-cnn"), RunConfig("digits-cnn", epochs=2)
        >>> task = Task("Digits", full, {"dense": TaskMethod("gradients as they are")}, small)
        >>> [(name, recipe.config.epochs) for name, recipe in task.recipes().items()]
        [('digits-cnn-dense', 30), ('digits-cnn-dense-small', 2)]
    """

    title: str
    full: RunConfig
    methods: Mapping[str, TaskMethod]
    small: RunConfig | None = None

    def recipes(self) -> dict[str, Recipe]:
        """All recipes by name, each followed by its small recipe."""
        made = {}
        for end, method in self.methods.items():
            name, about = self.name(end), f"{self.title}. {method.about[:1].upper()}{method.about[1:]}"
            made[name] = Recipe(about, partial(_config, name, self.full, method.strategy, method.changes))
            if self.small is not None:
                strategy = method.small_strategy or method.strategy
                small = partial(_config, name + SMALL, self.small, strategy, method.small_changes)
                made[name + SMALL] = Recipe(f"{about} (small)", small)
        return made

    def name(self, method: str) -> str:
        """Name of the recipe of a method."""
        return f"{self.full.recipe}-{method}" if method else self.full.recipe


def _config(name: str, base: RunConfig, strategy: str | None, changes: Mapping[str, Any]) -> RunConfig:
    config = replace(base, recipe=name, strategy=strategy or base.strategy, **changes)
    return replace(config, optimizer=momentum_applied_once(config))


def momentum_applied_once(config: RunConfig) -> Any:
    """The optimizer, without momentum if the averager applies momentum already.

    The optimizer's Nesterov form stays in the momentum of weight decay, also where the averager's momentum is plain.

    Raises:
        ValueError: the averager's momentum factor is not the optimizer's.
    """
    averager, optimizer = config.parsed_strategy().averager, config.optimizer
    if not (averager.traits.has_momentum and isinstance(optimizer, SGD) and optimizer.momentum):
        return optimizer
    if not isinstance(averager, Mean):  # such as Dion, whose momentum has no factor to compare
        return replace(optimizer, momentum=0.0)
    memory: Any = averager.memory
    require(
        memory.momentum == optimizer.momentum,
        f"{config.recipe}: {memory} must have the momentum of {optimizer}",
    )
    fields = ("learning_rate", "weight_decay", "undecayed", "schedule", "momentum", "nesterov")
    return DGCSGD(**{name: getattr(optimizer, name) for name in fields})
