"""What the studies share: runs that are trained unless they are there, and rows of results."""

from __future__ import annotations

import fcntl
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from thinwire.lab.report import Run, read_run
from thinwire.lab.train import RunConfig, train


def finished(config: RunConfig, words: str, label: str | None = None, may_train: bool = True) -> Run | None:
    """The run of this configuration, trained now unless it was before; None where it was not and is not wanted.

    Args:
        config: without its name.
        words: that set it apart from the other runs in its output folder; its name is made of them.
        label: what to call it.
        may_train: whether it is wanted.
    """
    name = re.sub(r"[^\w.]+", "-", words).strip("-").lower()
    folder = config.output / name
    if may_train:
        train(replace(config, name=name, resume=True))
    return read_run(folder, label or words) if (folder / "summary.json").exists() else None


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of all finished runs, a line of JSON each."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append(path: Path, row: dict[str, Any]) -> None:
    """Add the row of a run, and show it; several processes may share the file."""
    print(json.dumps(row), flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(row) + "\n")
