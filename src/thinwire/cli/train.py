"""`thinwire train`."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from .options import fail, named, parsed, show

TRAIN_USAGE = """\
usage: thinwire train RECIPE [OPTIONS]
       thinwire train --list

Train a network, one process a worker, and leave the records in runs/. The same command works under torchrun:

  torchrun --nproc-per-node 4 --no-python thinwire train digits

`thinwire train RECIPE --help` shows the options and the recipe's values.

"""


def train_command(options: list[str]) -> None:
    """Train a recipe and print its result."""
    from ..recipes import recipes, tasks
    from ..report import read_run, summary_table
    from ..train.launch import torchrun_size

    known = recipes()
    recipe, *options = options or ["--help"]
    if recipe in ("-h", "--help", "--list"):
        print(TRAIN_USAGE * (recipe != "--list") + _listed(tasks()), end="")
        return
    if recipe.startswith("-"):
        raise ValueError(f"the recipe comes first, as in: thinwire train {next(iter(known))} {recipe} ...")
    default = named(known, recipe, "recipe", "thinwire train --list").config
    default = replace(default, workers=torchrun_size() or default.workers)
    config = parsed(type(default), options, f"thinwire train {recipe}", default, known[recipe].about)
    folder = trained(config)
    if os.environ.get("RANK", "0") == "0":
        title = f"{config.recipe}, {config.workers} workers, seed {config.seed}"
        show(summary_table([read_run(folder)], title))
        print(f"  {folder}")


def trained(config: Any) -> Path:
    """Train; where a worker fails, one line says so and this process ends."""
    from ..train import WorkerError, train

    try:
        return train(config)
    except WorkerError as error:
        fail(error, 1)
        sys.stdout.flush()
        os._exit(1)  # at once: under torchrun, threads that wait for other workers would hold up an ordinary exit


def _listed(tasks: list[Any]) -> str:
    """Each task's title, then a line for each of its recipes."""
    from ..recipes import SMALL

    suffixes = ["" if task.small is None else f"[{SMALL}]" for task in tasks]
    width = max(len(task.name(end) + suffix) for task, suffix in zip(tasks, suffixes, strict=True) for end in task.methods)
    lines = [f"NAME[{SMALL}]: as published under NAME, and a twin that takes minutes on two cores under NAME{SMALL}"]
    for task, suffix in zip(tasks, suffixes, strict=True):
        lines += ["", task.title]
        lines += [f"  {task.name(end) + suffix:<{width}}  {method.about}" for end, method in task.methods.items()]
    return "\n".join(lines) + "\n"
