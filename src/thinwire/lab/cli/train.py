"""usage: thinwire train RECIPE [OPTIONS]
       thinwire train --list

Train a network with one process for each worker, and write the results to runs/. The same command works under torchrun, srun
and mpirun, which then start the workers:

  torchrun --nproc-per-node 4 --no-python thinwire train digits

--config FILE takes values from a TOML file, or from a run's config.json; several are composed in order, and options come last.

--strategy.averager.codec.ratio 0.001 changes one part of the strategy; so does strategy.averager.codec.ratio = 0.001 in a file.

--optimizer.kind Adam takes another optimizer with its defaults; add --help for its options. So do --data.kind, --model.kind and
--loss.kind.

--metrics [ADDRESS:]PORT serves the run's live page while it trains, and its numbers for Prometheus at /metrics. It is the page
of `thinwire watch RUN --serve [ADDRESS:]PORT`.

--evaluate CHECKPOINT trains nothing: it tests the model of a checkpoint, such as runs/NAME/checkpoints/best, with the
configuration that is saved there; options change it, such as --data.folder.

Ctrl-C, SIGTERM, SIGUSR1 and a terminal that closes (SIGHUP) stop the run after its step, with a checkpoint; `--resume`
continues it. Under `nohup` it outlives the terminal. Exit codes: 0 finished, 1 a worker failed, 2 an error in the command or
the data, 75 stopped and saved, 130 stopped by Ctrl-C and saved.

`thinwire train --list` shows the recipes. `thinwire train RECIPE --help` shows the options and the recipe's values.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...algorithm import require
from ...suggestion import named
from .options import fail, parsed, show, show_help
from .originals import TRAIN
from .watch import place, served

if TYPE_CHECKING:
    from ..train import Interrupted


def train_command(options: list[str]) -> None:
    """Train a recipe and print its result."""
    recipe, *options = options or ["--help"]
    if recipe in ("-h", "--help"):
        show_help(__doc__)
        return
    from ..output import WhileOpen
    from ..overrides import overridden
    from ..recipes import recipes, tasks
    from ..report import read_run, summary_table
    from ..train.config import PARTS
    from ..train.start.environment import set_variables

    if recipe == "--list":
        if options:
            raise ValueError(f"--list takes nothing else, got {' '.join(options)!r}; see thinwire train --help")
        print(_listed(tasks()), end="")
        return
    known = recipes()
    if recipe.startswith("-"):
        raise ValueError(f"the recipe comes before {recipe}, as in: thinwire train {next(iter(known))}")
    default = named(known, recipe, "recipe", "thinwire train --list").config
    environment = set_variables()
    default = replace(default, workers=environment.size if environment else default.workers)
    own = {
        "--evaluate": "a checkpoint, such as runs/NAME/checkpoints/best",
        "--metrics": "[ADDRESS:]PORT, such as 9100",
        "--config": "a file, such as slow-network.toml",
        **{f"--{part}.kind": "a kind, such as --optimizer.kind Adam" for part in PARTS},
    }
    taken, rest = _taken(options, own)
    checkpoint = Path(taken["--evaluate"][-1]) if taken["--evaluate"] else None
    if checkpoint is not None:
        default = _of_checkpoint(default, checkpoint)
    default = _composed(default, taken["--config"])
    for part in PARTS:
        for kind in taken[f"--{part}.kind"][-1:]:
            default = overridden(default, {f"{part}.kind": kind})
    config = parsed(type(default), rest, f"thinwire train {recipe}", default, known[recipe].about, TRAIN, tuple(own))
    if checkpoint is not None:
        _evaluate(config, checkpoint)
        return
    serve = None
    if taken["--metrics"]:
        address, port = place(taken["--metrics"][-1], "--metrics")
        serve = partial(served, address=address, port=port)
    folder = trained(config, lambda stop: _advice(recipe, options, config, stop), serve)
    if os.environ.get("RANK", "0") == "0":
        run = read_run(folder)
        workers = run.summary.get("workers", config.workers)
        with redirect_stdout(WhileOpen().as_text):  # the run has finished, also if nobody reads this
            show(summary_table([run], f"{config.recipe}, {workers} worker{'s' * (workers != 1)}, seed {config.seed}"))
            print(f"  {folder}")


def _taken(options: list[str], own: Mapping[str, str]) -> tuple[dict[str, list[str]], list[str]]:
    """The values of the command's own options by name, and the other options.

    Args:
        options: words of the command line.
        own: what each of these options needs, in words.

    Example:
        >>> _taken(["--seed", "1", "--config", "a", "--config=b"], {"--config": "a file"})
        ({'--config': ['a', 'b']}, ['--seed', '1'])
    """
    taken: dict[str, list[str]] = {name: [] for name in own}
    rest: list[str] = []
    words = iter(options)
    for word in words:
        name, equals, value = word.partition("=")
        if name in own:
            taken[name].append(value if equals else next(words, ""))
            require(bool(taken[name][-1]), f"{name} needs {own[name]}")
        else:
            rest.append(word)
    return taken, rest


def _of_checkpoint(config: Any, folder: Path) -> Any:
    """The configuration that is saved in a checkpoint of the same recipe."""
    from ..fields import flat
    from ..files import load_json_object
    from ..overrides import overridden

    description = folder / "checkpoint.json"
    require(description.is_file(), f"{folder} is no checkpoint: it has no checkpoint.json")
    saved = load_json_object(description).get("config")
    recipe = saved.get("recipe") if isinstance(saved, dict) else None
    if not (isinstance(saved, dict) and isinstance(recipe, str)):
        raise ValueError(
            f"{description} is damaged: it has no config with a recipe; restore it, or test another checkpoint"
        )
    require(
        recipe == config.recipe, f"{folder} is of the recipe {recipe}; write: thinwire train {recipe} --evaluate ..."
    )
    try:
        return overridden(config, dict(flat({key: value for key, value in saved.items() if key != "recipe"})))
    except ValueError as error:
        raise ValueError(f"{description}: {error}") from None


def _evaluate(config: Any, folder: Path) -> None:
    """Test the model of a checkpoint, and print its metrics."""
    from ..train import evaluate_checkpoint

    if os.environ.get("RANK", "0") == "0":
        for name, value in evaluate_checkpoint(config, folder).items():
            print(f"{name} {value:.6g}")


def _composed(config: Any, files: list[str]) -> Any:
    """The configuration with the values of each file, one after the other.

    Raises:
        ValueError: a file that cannot be read, or a value that the configuration does not have.
    """
    from ..fields import flat
    from ..files import load_json_object, load_toml
    from ..overrides import overridden

    for name in files:
        table = load_json_object(Path(name)) if name.endswith(".json") else load_toml(Path(name))
        try:
            config = overridden(config, dict(flat(table)))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return config


def trained(
    config: Any,
    advice: Callable[[Interrupted], str] = lambda stop: "",
    on_start: Callable[[Path], object] | None = None,
) -> Path:
    """Train and return the run's folder. If a worker fails or a signal stops the run, print one line and exit.

    Args:
        config: the run's configuration.
        advice: text to add to the message about a stopped run.
        on_start: called with the run's folder before the training starts.
    """
    from ..train import Interrupted, WorkerError, train

    def report(stop: Interrupted) -> None:
        fail(f"{stop}{advice(stop)}", stop.exit_code)

    try:
        return train(config, report, on_start=on_start)
    except Interrupted as stop:
        sys.exit(stop.exit_code)
    except WorkerError as error:
        fail(error, 1)
        sys.stdout.flush()
        os._exit(1)  # at once: under torchrun, a normal exit would wait for threads that wait for other workers


def _advice(recipe: str, options: list[str], config: Any, stop: Interrupted) -> str:
    """The command that continues a stopped run, if it had begun."""
    if stop.checkpoint is None:
        return ""
    kept = [option for option in options if option != "--overwrite"]
    # The folder ends in the suffix, which the command adds again.
    name = [] if config.name else ["--name", stop.checkpoint.parent.parent.name.removesuffix(config.suffix)]
    again = ["thinwire", "train", recipe, *kept, *name, *(() if config.resume else ("--resume",))]
    return f"; go on with: {shlex.join(again)}"


def _listed(tasks: list[Any]) -> str:
    """Each task's title, then a line for each of its recipes."""
    from ..recipes import SMALL

    suffixes = ["" if task.small is None else f"[{SMALL}]" for task in tasks]
    width = max(
        len(task.name(end) + suffix) for task, suffix in zip(tasks, suffixes, strict=True) for end in task.methods
    )
    lines = [
        f"NAME[{SMALL}]: as published under NAME, and a small version that takes minutes on two cores under NAME{SMALL}"
    ]
    for task, suffix in zip(tasks, suffixes, strict=True):
        lines += ["", task.title]
        lines += [f"  {task.name(end) + suffix:<{width}}  {method.about}" for end, method in task.methods.items()]
    return "\n".join(lines) + "\n"
