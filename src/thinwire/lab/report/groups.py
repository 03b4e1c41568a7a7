"""Groups of runs: the runs of a group differ only in their seed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..fields import OF_THE_FOLDER, flat
from .runs import Problem, Run

# These fields set where a run is stored and how its workers connect, but not what it computes.
IGNORED = {*OF_THE_FOLDER, "seed", "checkpoint_every", "port", "interface"}
SIZES = {"workers", "epochs", "max_steps"}  # always named where they differ: longer runs are no better methods
MISSING = "not set"


@dataclass(frozen=True)
class Group:
    """Runs of one method.

    Args:
        words: the fields in which they differ from other groups, with their values as text.
        runs: the finished runs; if there are none, the unfinished ones.
        name: the label if no field differs.
    """

    words: dict[str, str]
    runs: list[Run]
    name: str = ""

    @property
    def label(self) -> str:
        """The label in tables and figures."""
        return ", ".join(self.words.values()) or self.name

    @property
    def finished(self) -> bool:
        """Whether its runs have results."""
        return all(run.finished for run in self.runs)

    def without(self, field: str) -> Group:
        """The same group without this field in its label."""
        return replace(self, words={key: word for key, word in self.words.items() if key != field})


def differing(runs: Sequence[Run]) -> list[str]:
    """Fields of the configuration in which these runs differ, apart from the seed."""
    configs = [dict(flat(run.config)) for run in runs]
    fields = dict.fromkeys(key for config in configs for key in config)
    return [key for key in fields if key not in IGNORED and len({repr(c.get(key, MISSING)) for c in configs}) > 1]


def repeated(runs: Sequence[Run]) -> list[Problem]:
    """The finished runs that have the configuration and the seed of an earlier one: they are no further seed of the method."""
    first: dict[str, Run] = {}
    problems = []
    for run in runs:
        if not run.finished:
            continue
        fields = sorted((key, repr(value)) for key, value in flat(run.config) if key not in IGNORED - {"seed"})
        other = first.setdefault(repr(fields), run)
        if other is not run:
            text = f"has the configuration and the seed of {other.folder}; both count, so leave one of them out"
            problems.append(Problem(run.folder, text))
    return problems


def grouped(runs: Sequence[Run], by: Sequence[str] = (), names: Mapping[str, str] | None = None) -> list[Group]:
    """Put runs into groups, in the order of their first runs.

    Args:
        runs: read from their folders.
        by: the fields that make a group; empty => all fields in which runs differ.
        names: the text of a value in labels -> the text to show instead.

    Raises:
        ValueError: an unknown field, or a name for a text that no label has.
    """
    configs = [dict(flat(run.config)) for run in runs]
    known = sorted({key for config in configs for key in config})
    for key in by:
        if key not in known:
            raise ValueError(f"no run has a field {key!r} to group by; fields that there are: {', '.join(known)}")
    fields, names = list(by) or differing(runs), names or {}
    telling = _telling(configs, fields)
    members: dict[tuple[str, ...], list[tuple[dict[str, str], Run]]] = {}
    for run, config in zip(runs, configs, strict=True):
        values = {key: config.get(key, MISSING) for key in fields}
        words = {key: _words(key, values[key]) for key in telling}
        # Values may be lists, which are no keys.
        members.setdefault(tuple(map(repr, values.values())), []).append((words, run))
    _check_names(
        names, {word for pairs in members.values() for words, run in pairs for word in (*words.values(), run.label)}
    )
    return [_group(pairs[0][0], [run for _, run in pairs], names) for pairs in members.values()]


def _telling(configs: Sequence[dict[str, Any]], fields: Sequence[str]) -> list[str]:
    """The sizes of runs, and the fewest other fields that distinguish all groups, the strategy first."""
    chosen: list[str] = []
    for key in sorted(fields, key=lambda key: key != "strategy"):
        if key in SIZES:
            chosen.append(key)
            continue
        before, after = (
            {tuple(repr(c.get(k, MISSING)) for k in keys) for c in configs} for keys in (chosen, [*chosen, key])
        )
        chosen += [key] * (len(after) > len(before))
    return chosen


def _check_names(names: Mapping[str, str], words: set[str]) -> None:
    for old in names:
        if old not in words:
            raise ValueError(f"nothing is called {old!r}; there are: {'; '.join(sorted(words))}")


def _group(words: dict[str, str], runs: list[Run], names: Mapping[str, str]) -> Group:
    finished = [run for run in runs if run.finished]
    shown = {key: names.get(word, word) for key, word in words.items()}
    return Group(shown, finished or runs, names.get(runs[0].label, runs[0].label))


def _words(key: str, value: Any) -> str:
    """A field and its value, as short as is clear."""
    if key == "strategy":
        return str(value)
    if key == "workers" and isinstance(value, int):
        return f"{value} worker{'s' * (value != 1)}"
    return f"{key.rpartition('.')[2]}={value}"


def what_was_run(runs: Sequence[Run]) -> str:
    """Describe recipe, workers, length, batch, data and seeds in one sentence; values that differ are listed."""
    configs = [dict(flat(run.config)) for run in runs]

    def listed(key: str) -> str:
        values = {str(config[key]) for config in configs if config.get(key) is not None}
        *others, last = sorted(values, key=lambda text: (len(text), text)) or [""]  # 2 comes before 10
        return f"{', '.join(others)} and {last}" if others else last

    last = [run.rows[-1] for run in runs]
    steps, epochs = {row["step"] for row in last}, {f"{row['epoch']:.3g}" for row in last if row.get("epoch")}
    length = f"{_range(steps)} step{'s' * (steps != {1})}" + (
        f" ({_range(map(float, epochs))} epoch{'s' * (epochs != {'1'})})" if epochs else ""
    )
    data = ", ".join(f"{key[5:]}={listed(key)}" for key in configs[0] if key.startswith("data."))
    parts = [
        f"recipe {listed('recipe')}",
        f"{listed('workers')} worker{'s' * (listed('workers') != '1')}",
        length,
        f"batches of {listed('batch_size')} a worker",
        f"split {listed('split')}" if listed("split") else "",
        f"data: {data}" if data else "",
        f"seeds {listed('seed')}" if " and " in listed("seed") else f"seed {listed('seed')}",
    ]
    return "; ".join(part for part in parts if part)


def _range(values: Iterable[float]) -> str:
    low, *_, high = [*sorted(values)] * 2
    return f"{low:.10g}" if low == high else f"{low:.10g} to {high:.10g}"
