"""Recipes: named, complete run configurations. There is one module per kind of data; `base` defines recipes.

All modules of this package with `TASKS` contribute them, in the order of the modules' names; after them come those that
installed packages declare in the entry-point group `thinwire.recipes`:

    [project.entry-points."thinwire.recipes"]
    my-method = "my_package.recipes:TASKS"
"""

from __future__ import annotations

import importlib.metadata
import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import Any

from ...algorithm import require
from ...messages import error_place, error_text, log
from .base import SMALL, Recipe, Task, TaskMethod
from .check import check_recipe

__all__ = ["SMALL", "TaskMethod", "Recipe", "Task", "check_recipe", "recipes", "tasks"]


ENTRY_POINT_GROUP = "thinwire.recipes"


def tasks() -> list[Task]:
    """All tasks. Those of an installed package that are wrong are left out, with a warning."""
    modules = [import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    found = [task for module in modules for task in getattr(module, "TASKS", ())]
    for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        try:
            found += _checked(entry.load(), {name for task in found for name in task.recipes()})
        # A broken package must not take away the recipes of all others.
        except Exception as error:
            package = "" if entry.dist is None else entry.dist.name
            log.warning(
                f"the recipes {entry.value} of the package {package} are left out: {error_text(error)}{error_place(error)}; "
                "mend or uninstall it"
            )
    return found


def _checked(added: Any, known: set[str]) -> list[Task]:
    """The tasks of an installed package.

    Raises:
        ValueError: they are no tasks, or one of their recipes cannot be made or has a name that is known already.
    """
    is_tasks = isinstance(added, (list, tuple)) and all(isinstance(task, Task) for task in added)
    require(is_tasks, f"they must be a tuple of `Task`, got {added!r:.100}")
    names = [recipe.config.recipe for task in added for recipe in task.recipes().values()]  # makes each of them
    taken = [name for i, name in enumerate(names) if name in known or name in names[:i]]
    require(not taken, f"there is a recipe {', '.join(map(repr, taken))} already; choose another name")
    return list(added)


@cache
def recipes() -> Mapping[str, Recipe]:
    """All recipes by name."""
    return MappingProxyType({name: recipe for task in tasks() for name, recipe in task.recipes().items()})
