"""Reads runs from their folders: finished runs, unfinished runs, and the problems of all others.

A run's folder holds `config.json` (the configuration), `metrics.jsonl` (a row per log step) and, once it is finished,
`summary.json`. A row always has `step`; every other column may be missing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ...algorithm import require
from ..files import NUMBERS, check_config, check_row, check_summary, load_json_object, read_json
from .consensus import measured

FILES = ("config.json", "metrics.jsonl", "summary.json")


@dataclass(frozen=True)
class Run:
    """The files of a run.

    Args:
        label: its name in tables and figures.
        summary: `summary.json`; empty if the run is not finished.
        rows: `metrics.jsonl`, a dictionary per log step.
        config: `config.json`.
        folder: the folder of the run.
    """

    label: str
    summary: dict[str, Any]
    rows: list[dict[str, Any]]
    config: dict[str, Any] = field(default_factory=dict)
    folder: Path = Path()

    @property
    def finished(self) -> bool:
        """Whether the run has a summary."""
        return bool(self.summary)


class Problem(NamedTuple):
    """A problem of a folder or a file, as text."""

    path: Path
    text: str


@dataclass(frozen=True)
class Found:
    """The runs in some folders, the rows of consensus experiments by file, and the problems."""

    runs: list[Run] = field(default_factory=list)
    consensus: dict[Path, list[dict[str, Any]]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def read_run(folder: Path, label: str | None = None) -> Run:
    """Read a finished run; its strategy is its label, unless another is given.

    Raises:
        ValueError: the folder has no finished run, or a damaged file; the message names the file.
    """
    for name in ("summary.json", "metrics.jsonl"):
        require((folder / name).exists(), f"{folder} holds no finished run: {name} is missing")
    summary, complaints = load_json_object(folder / "summary.json"), list[str]()
    rows = read_rows(folder / "metrics.jsonl", complaints)
    missing = [key for key in ("strategy", "final", *NUMBERS) if summary.get(key) is None]
    try:
        check_summary(summary)
        require(not missing, f"it lacks {', '.join(missing)}")
    except ValueError as error:
        raise ValueError(
            f"{folder / 'summary.json'} is damaged: it does not hold what a run writes ({error}); restore it, or run again"
        ) from None
    require(not complaints, f"{folder / 'metrics.jsonl'} is damaged: {'; '.join(complaints)}; restore it, or run again")
    return Run(label or str(summary["strategy"]), summary, rows, folder=folder)


def find(paths: Sequence[Path]) -> Found:
    """All runs in these folders and below them, in the order of their paths; .json files are consensus experiments.

    Raises:
        ValueError: there is no run and no experiment.
    """
    found, seen = Found(), set[Path]()
    for path in paths:
        if path.is_file():
            _add_consensus(path, found)
            continue
        folders = sorted(_run_folders(path, found))
        for folder in folders:
            # Paths may overlap, or lead through links to the same folder.
            if (real := folder.resolve()) not in seen:
                seen.add(real)
                try:
                    _add_run(folder, found)
                except PermissionError as error:
                    found.problems.append(_denied(error))
        if not folders:
            found.problems.append(Problem(path, "holds no run" if path.is_dir() else "does not exist"))
    if not found.runs and not found.consensus:
        reasons = "; ".join(f"{path} {text}" for path, text in found.problems[:3])
        raise ValueError(f"no run to report on: {reasons or 'no folder was given'}")
    return found


def _denied(error: PermissionError) -> Problem:
    return Problem(Path(error.filename), f"cannot be read ({error.strerror}); left out")


def _run_folders(path: Path, found: Found) -> Iterator[Path]:
    def note(error: OSError) -> None:
        if isinstance(error, PermissionError):
            found.problems.append(_denied(error))

    seen = set[str]()
    for folder, below, files in os.walk(path, onerror=note, followlinks=True):
        is_run, real = bool(set(FILES) & set(files)), os.path.realpath(folder)
        if is_run:
            yield Path(folder)
        # Checkpoints and events contain no runs, and links may lead in a circle.
        below[:] = [] if is_run or real in seen else sorted(below)
        seen.add(real)


def _add_run(folder: Path, found: Found) -> None:
    """Read a run's files, and note each problem."""
    complaints: list[str] = []
    config = read_object(folder / "config.json", check_config, complaints)
    rows = read_rows(folder / "metrics.jsonl", complaints)
    path = folder / "summary.json"  # only finished runs have it
    summary = read_object(path, check_summary, complaints) if path.exists() else {}
    if not summary and rows:
        complaints.append(f"not finished: its last row is of step {rows[-1]['step']}")
    if config and rows:
        found.runs.append(Run(str(config.get("strategy", folder.name)), summary, rows, config, folder))
    else:
        complaints[-1] += "; left out"
    if complaints:
        found.problems.append(Problem(folder, "; ".join(complaints)))


def read_object(path: Path, check: Callable[[dict[str, Any]], None], complaints: list[str]) -> dict[str, Any]:
    """The object in a file; empty if there is a complaint."""
    value = read_json(path)
    if value is None:
        complaints.append(f"{path.name} {'cannot be read' if path.exists() else 'is missing'}")
        return {}
    try:
        check(value)
    except ValueError as error:
        complaints.append(f"{path.name} does not hold what a run writes: {error}")
        return {}
    # Neither figures nor pages can hold the half characters that stand for the bytes of a path in another encoding.
    read: dict[str, Any] = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    return read


def read_rows(path: Path, complaints: list[str]) -> list[dict[str, Any]]:
    """All rows that can be read; a killed run may end with half a line."""
    try:
        # A killed run may end within a character.
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        wrong = "is missing" if isinstance(error, FileNotFoundError) else "cannot be read"
        complaints.append(f"{path.name} {wrong}")
        return []
    if not lines:
        complaints.append(f"{path.name} is empty")
    rows = [_row(line) for line in lines]
    broken = [str(number) for number, row in enumerate(rows, 1) if row is None]
    if broken:
        some = ", ".join(broken[:5]) + (" ..." if len(broken) > 5 else "")
        complaints.append(f"line{'s' * (len(broken) > 1)} {some} of {path.name} cannot be read")
    return [row for row in rows if row is not None]


def _row(line: str) -> dict[str, Any] | None:
    try:
        row: dict[str, Any] = json.loads(line)
        check_row(row)
    except (ValueError, RecursionError):
        return None
    return row if "step" in row else None


def _add_consensus(path: Path, found: Found) -> None:
    """Read the rows of a file of `thinwire consensus --json`."""
    rows = measured(path)
    if rows:
        found.consensus[path] = rows
    else:
        found.problems.append(
            Problem(path, "is neither a run's folder nor what thinwire consensus --json writes; left out")
        )
