"""Reads runs from their folders: finished runs, unfinished runs, and the problems of all others.

A run's folder holds `config.json` (the configuration), `metrics.jsonl` (a row per log step) and, once it is finished,
`summary.json`. A row always has `step`; every other column may be missing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ...algorithm import require
from ..files import check_row, is_number, load_json_object, read_json

FILES = ("config.json", "metrics.jsonl", "summary.json")
NUMBERS = ("bytes_sent_per_worker", "dense_fp32_bytes", "dense_bf16_bytes", "seconds")  # of a summary


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
    complete = _is_summary(summary) and all(summary.get(key) is not None for key in ("strategy", "final", *NUMBERS))
    require(
        complete, f"{folder / 'summary.json'} is damaged: it does not hold what a run writes; restore it, or run again"
    )
    require(not complaints, f"{folder / 'metrics.jsonl'} is damaged: {'; '.join(complaints)}; restore it, or run again")
    return Run(label or str(summary["strategy"]), summary, rows, folder=folder)


def _is_summary(value: dict[str, Any]) -> bool:
    """Whether the values of a summary are numbers, or null for a run that diverged."""
    final = value.get("final", {})
    numbers = [value.get(key) for key in NUMBERS]
    return isinstance(final, dict) and all(map(is_number, [*numbers, *final.values()]))


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
    config = _read_object(folder / "config.json", complaints)
    rows = read_rows(folder / "metrics.jsonl", complaints)
    path = folder / "summary.json"  # only finished runs have it
    summary = (_read_object(path, complaints) if path.exists() else None) or {}
    if not _is_summary(summary):
        complaints.append(f"{path.name} does not hold what a run writes")
        summary = {}
    if not summary and rows:
        complaints.append(f"not finished: its last row is of step {rows[-1]['step']}")
    if config and rows:
        found.runs.append(Run(str(config.get("strategy", folder.name)), summary, rows, config, folder))
    else:
        complaints[-1] += "; left out"
    if complaints:
        found.problems.append(Problem(folder, "; ".join(complaints)))


def _read_object(path: Path, complaints: list[str]) -> dict[str, Any] | None:
    value = read_json(path)
    if isinstance(value, dict) and value:
        return value
    wrong = "cannot be read" if value is None else "does not hold what a run writes"
    complaints.append(f"{path.name} {wrong if path.exists() else 'is missing'}")
    return None


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
    except ValueError:
        return None
    return row if "step" in row else None


def _add_consensus(path: Path, found: Found) -> None:
    """Read the rows of a file of `thinwire consensus --json`."""
    needed = {"averager", "round", "bits_sent", "squared_error"}
    rows = read_json(path)
    if isinstance(rows, list) and rows and all(isinstance(row, dict) and needed <= row.keys() for row in rows):
        found.consensus[path] = rows
    else:
        found.problems.append(
            Problem(path, "is neither a run's folder nor what thinwire consensus --json writes; left out")
        )
