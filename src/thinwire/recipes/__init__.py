"""Recipes: functions without arguments that return a full run configuration; one module per task.

Every public function of a module in this folder is a recipe, named for the command line with hyphens in place of
underscores; the first line of its docstring is what `thinwire train --list` says of it.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from importlib import import_module

from ..train import RunConfig


def recipes() -> dict[str, Callable[[], RunConfig]]:
    """All recipes by name."""
    modules = [import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    return {
        name.replace("_", "-"): function
        for module in modules
        for name, function in vars(module).items()
        if inspect.isfunction(function) and function.__module__ == module.__name__ and not name.startswith("_")
    }
