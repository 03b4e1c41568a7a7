"""What a recipe is: a run's full configuration under a name.

A module of this folder has `TASKS`: each is a model on data, with the methods that it is trained by. A task makes a recipe
`<task>-<method>` of every method, as published, and its twin `<task>-<method>-small`, which takes minutes on two cores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...algorithm import require
from ...average import Averager
from ..train import RunConfig
from ..train.optimize import DGCSGD, SGD

SMALL = "-small"


@dataclass(frozen=True)
class Recipe:
    """A run's configuration, and what to say of it in a line: model, data, source and what is sent."""

    about: str
    config: RunConfig


@dataclass(frozen=True)
class Method:
    """How the workers of a task agree.

    Args:
        about: a line: what is sent, and from which paper (arXiv number) if not the task's own.
        averager: as in `RunConfig`.
        small_averager: of the small twin, where a short run needs another, such as earlier updates; None for the same.
        changes: fields of `RunConfig` that this method has of its own.
        small_changes: likewise of the small twin, which has none of `changes`.
    """

    about: str
    averager: str = "Mean()"
    small_averager: str | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    small_changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """A model on data, and the methods that it is trained by.

    Args:
        title: heading of its recipes: model, data, and the paper that the hyperparameters are from (arXiv number).
        full: the hyperparameters as published; its `recipe` begins the names.
        methods: by the end of the name; "dense" is the baseline.
        small: of the twins, in minutes on two cores; None where there are none, for the task is small as it is.

    Example:
        >>> from thinwire.lab.train import RunConfig
        >>> full, small = RunConfig("digits-cnn"), RunConfig("digits-cnn", epochs=2)
        >>> task = Task("Digits", full, {"dense": Method("gradients as they are")}, small)
        >>> [(name, recipe.config.epochs) for name, recipe in task.recipes().items()]
        [('digits-cnn-dense', 30), ('digits-cnn-dense-small', 2)]
    """

    title: str
    full: RunConfig
    methods: Mapping[str, Method]
    small: RunConfig | None = None

    def recipes(self) -> dict[str, Recipe]:
        """All recipes by name, each followed by its small twin."""
        made = {}
        for end, method in self.methods.items():
            name, about = self.name(end), f"{self.title}. {method.about}"
            made[name] = _recipe(name, about, self.full, method.averager, method.changes)
            if self.small is not None:
                averager = method.small_averager or method.averager
                made[name + SMALL] = _recipe(
                    name + SMALL, f"{about} (small)", self.small, averager, method.small_changes
                )
        return made

    def name(self, method: str) -> str:
        """Name of the recipe of a method."""
        return f"{self.full.recipe}-{method}" if method else self.full.recipe


def _recipe(name: str, about: str, base: RunConfig, averager: str, changes: Mapping[str, Any]) -> Recipe:
    config = replace(base, recipe=name, averager=averager, **changes)
    return Recipe(about, replace(config, optimizer=momentum_applied_once(config)))


def momentum_applied_once(config: RunConfig) -> Any:
    """The optimizer, with no momentum of its own for gradients if the averager applies momentum to them.

    Raises:
        ValueError: the averager's momentum is not the optimizer's.
    """
    averager, optimizer = config.parsed_averager(), config.optimizer
    if not (isinstance(averager, Averager) and averager.has_momentum and isinstance(optimizer, SGD)):
        return optimizer
    memory, same = averager.memory, (optimizer.momentum, optimizer.nesterov)
    require(
        (memory.momentum, memory.nesterov) == same, f"{config.recipe}: {memory} must have the momentum of {optimizer}"
    )
    fields = ("learning_rate", "weight_decay", "decay_vectors", "schedule", "momentum", "nesterov")
    return DGCSGD(**{name: getattr(optimizer, name) for name in fields})
