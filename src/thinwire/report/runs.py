"""A run as read back from its folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Run:
    """What a finished run left behind.

    Args:
        label: what to call it in tables and figures.
        summary: `summary.json`.
        rows: `metrics.jsonl`, a dictionary per log step.
    """

    label: str
    summary: dict[str, Any]
    rows: list[dict[str, float]]


def read_run(folder: Path, label: str | None = None) -> Run:
    """Read a finished run; its averager is its label, unless another is given.

    Raises:
        ValueError: the folder holds no finished run.
    """
    try:
        summary = json.loads((folder / "summary.json").read_text())
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    except FileNotFoundError as error:
        raise ValueError(f"{folder} holds no finished run: {Path(error.filename).name} is missing") from None
    return Run(label or summary["averager"], summary, rows)
