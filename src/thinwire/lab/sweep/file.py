"""Reads a sweep's file, and plans its runs.

    recipe = "digits"              or  command = "consensus"
    output = "runs/digits"         parent of the runs' folders; by default runs/ and the file's name

    [fixed]                        field path = value, for all runs
    workers = 4

    [grid]                         field path = list of values; all combinations are run
    strategy = ["Gradients(Mean())", "Local(Mean(), every=4)"]
    seed = [1, 2, 3]               (recipe = [...] too)

    [[list]]                       values that go together; every such table is combined with the whole grid
    optimizer.learning_rate = 0.1
    optimizer.momentum = 0.0

Several grids, each a table [[grid]], are run one after the other.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...algorithm import require
from ...suggestion import suggestion
from ..fields import flat
from ..files import load_toml
from ..overrides import overridden
from .identity import identity
from .tasks import RUN_KINDS, RunKind

TOP = ("recipe", "command", "output", "fixed", "grid", "list")
SHAPES: dict[str, tuple[type | tuple[type, ...], str]] = {
    "fixed": (dict, "a table, [fixed]"),
    "grid": ((dict, list), "a table, [grid], or several, [[grid]]"),
    "list": (list, "a list of tables, [[list]]"),
}
LONGEST_NAME = 80  # characters of a run's folder name, without its hash

Values = dict[str, Any]


@dataclass(frozen=True)
class PlannedRun:
    """One run of a sweep.

    Args:
        command: "train" or "consensus".
        values: field path -> value: all values that the file sets for this run, with its recipe.
        varied: the values from the grid and the list, in which runs of the sweep differ.
        config: the complete configuration.
        identity: see `identity`.
        folder: the run's own folder.
    """

    command: str
    values: Values
    varied: Values
    config: Any
    identity: str
    folder: Path

    @property
    def task(self) -> RunKind:
        """The kind of run."""
        return RUN_KINDS[self.command]

    @property
    def records(self) -> Path:
        """The sweep's own files of the run: log, values, lock. It exists before the run's folder."""
        return self.folder.parent / ".sweep" / self.folder.name


@dataclass(frozen=True)
class Sweep:
    """All runs of a file, in its order."""

    file: Path
    output: Path
    runs: tuple[PlannedRun, ...]


def read_sweep(file: Path) -> Sweep:
    """Read a sweep's file, and check every run in it.

    Raises:
        ValueError: one line with the file, the field, the expected value and a suggestion.
    """
    table = load_toml(file)
    try:
        return _sweep(file, table)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def where_it_runs(sweep: Sweep) -> Sweep:
    """The sweep with the output folder in which it was started, also if the current folder is another one.

    Looks for a relative output in the current folder, then in the folder of the sweep's file and in its parents.
    """
    if has_begun(sweep):
        return sweep
    for parent in sweep.file.resolve().parents:
        output = parent / sweep.output
        moved = replace(
            sweep, output=output, runs=tuple(replace(run, folder=output / run.folder.name) for run in sweep.runs)
        )
        if has_begun(moved):
            return moved
    return sweep


def has_begun(sweep: Sweep) -> bool:
    """Whether any run of the sweep was started in its output folder."""
    return any(run.records.exists() or run.folder.exists() for run in sweep.runs)


def _sweep(file: Path, table: Mapping[str, Any]) -> Sweep:
    _check(table)
    command, grids = table.get("command", "train"), table.get("grid", {})
    output = Path(table.get("output", Path("runs") / file.stem))
    fixed = _unique(flat(table.get("fixed", {})))
    runs: dict[str, PlannedRun] = {}
    for grid in grids if isinstance(grids, list) else [grids]:
        require(isinstance(grid, Mapping), f"grid must be {SHAPES['grid'][1]}, got {grid!r}")
        for varied in points(grid, table.get("list", [])):
            run = planned(command, table.get("recipe"), fixed, varied, output)
            other = runs.setdefault(run.identity, run)
            same = f"{in_words(other.varied)} and {in_words(varied)} are the same run; take one of them out"
            require(other is run, same)
    return Sweep(file, output, tuple(runs.values()))


def _check(table: Mapping[str, Any]) -> None:
    for name, value in table.items():
        require(name in TOP, f"unknown entry {name!r}{suggestion(name, TOP)}; values of runs go into [fixed] or [grid]")
        kind, shape = SHAPES.get(name, (str, "text"))
        require(isinstance(value, kind), f"{name} must be {shape}, got {value!r}")
    command = table.get("command", "train")
    require(command in RUN_KINDS, f"unknown command {command!r}{suggestion(command, RUN_KINDS)}")


def points(grid: Mapping[str, Any], rows: list[Mapping[str, Any]]) -> Iterator[Values]:
    """The values of each run: a table of [[list]] with one value of each list of the grid; the last grid key varies fastest.

    Example:
        >>> list(points({"seed": [1, 2]}, []))
        [{'seed': 1}, {'seed': 2}]
        >>> list(points({}, [{"strategy": "Gossip(Mix())", "optimizer": {"momentum": 0.0}}]))
        [{'strategy': 'Gossip(Mix())', 'optimizer.momentum': 0.0}]
    """
    lists = _unique(flat(grid))
    for path, values in lists.items():
        require(
            isinstance(values, list), f"grid.{path} must be a list of values, got {values!r}; else it goes into [fixed]"
        )
        require(len(values) > 0, f"grid.{path} is an empty list; nothing would run")
    for row in rows or [{}]:
        require(isinstance(row, Mapping), f"list must hold tables, [[list]], got {row!r}")
        for values in itertools.product(*lists.values()):
            chosen = zip(lists, values, strict=True)
            yield _unique([*flat(row), *(item for path, value in chosen for item in flat({path: value}))])


def planned(command: str, recipe: str | None, fixed: Mapping[str, Any], varied: Values, output: Path) -> PlannedRun:
    """The run with these values.

    Raises:
        ValueError: they make no run.
    """
    task = RUN_KINDS[command]
    for path in fixed.keys() & varied.keys():
        raise ValueError(f"{path} is given twice, under [fixed] and as a value that varies; take one of them out")
    values = _unique([*({"recipe": recipe} if recipe else {}).items(), *fixed.items(), *varied.items()])
    recipe = values.get("recipe")
    for path in values:
        where = "write output = ... at the top of the file" if path == "output" else "leave it out"
        require(path not in task.reserved, f"{path} is set by the sweep; {where}")
    try:
        config = overridden(task.base(recipe), {path: value for path, value in values.items() if path != "recipe"})
        plain = task.as_dict(config)
        task.check(config)
    except ValueError as error:
        raise ValueError(f"{error} (in the run {in_words(varied)})" if varied else str(error)) from None
    # Readable names are cut off at LONGEST_NAME, so the hash tells runs apart.
    name = f"{readable(varied) or recipe or command}-{identity(plain)[:8]}"
    return PlannedRun(command, values, varied, config, identity(plain), output / name)


def _unique(items: Any) -> Values:
    values: Values = {}
    for path, value in items:
        require(path not in values, f"{path} is given twice")
        values[path] = value
    return values


def readable(varied: Mapping[str, Any]) -> str:
    """The varied values in characters that are safe in a path; numbers get the name of their field.

    Example:
        >>> readable({"strategy": "Local(Mean(), every=4)", "optimizer.learning_rate": 0.1})
        'local-mean-4-learning_rate0.1'
    """
    parts = []
    for path, value in varied.items():
        words = re.findall(r"[\w.]+", re.sub(r"\w+=", "", str(value)))
        parts.append("-".join(words) if isinstance(value, str) else path.split(".")[-1] + "-".join(words))
    return "-".join(filter(None, parts)).lower()[:LONGEST_NAME].strip("-.")


def in_words(values: Mapping[str, Any]) -> str:
    """The values in the notation of the file, on one line.

    Example:
        >>> print(in_words({"strategy": "Gossip(Mix())", "seed": 1}))
        strategy = "Gossip(Mix())", seed = 1
    """
    quoted = {path: f'"{value}"' if isinstance(value, str) else str(value) for path, value in values.items()}
    return ", ".join(f"{path} = {value}" for path, value in quoted.items())
