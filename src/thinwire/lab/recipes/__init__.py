"""Recipes: named, complete run configurations. There is one module per kind of data; `base` defines recipes.

All modules of this package with `TASKS` contribute them, in the order of the modules' names.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from types import MappingProxyType

from .base import SMALL, Recipe, Task, TaskMethod

__all__ = ["SMALL", "TaskMethod", "Recipe", "Task", "recipes", "tasks"]


def tasks() -> list[Task]:
    """All tasks."""
    modules = [import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    return [task for module in modules for task in getattr(module, "TASKS", ())]


@cache
def recipes() -> Mapping[str, Recipe]:
    """All recipes by name. They are made once.

    Raises:
        ValueError: two have the same name.
    """
    made: dict[str, Recipe] = {}
    for task in tasks():
        for name, recipe in task.recipes().items():
            if name in made:
                raise ValueError(f"two recipes are called {name!r}; tasks of one name must not share methods")
            made[name] = recipe
    return MappingProxyType(made)
