"""The figures of a consensus experiment: the error of the workers against bits and against rounds."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..files import is_number, read_json
from .legend import add_legend
from .style import GREY, line_style, logarithmic, new_figure, plain_axes, save, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FLOOR = 1e-13  # of the relative error: below it are only rounding errors of float32
TARGET = 1e-4  # of the relative error, at which bits are compared
STEP_SIZE = r"step_size=[^,()]+"  # as an averager's repr has it

Row = Mapping[str, Any]

SETTING: dict[str, Callable[[Any], str]] = {
    "workers": lambda workers: f"{workers} workers",
    "data": lambda data: f"{data} data",
    "shape": lambda shape: " x ".join(map(str, shape)),
    "seed": lambda seed: f"seed {seed}",
}
"""What a row says of its experiment, in words: runs that differ in it are not compared for the best step size."""


def measured(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of `thinwire consensus --json`; none if it is missing, damaged or something else."""
    rows: list[dict[str, Any]] = read_json(path, list) or []
    whole = all(map(_is_measured, rows)) and all(
        run[0]["squared_error"] and run[-1]["bits_sent"] for run in _runs(rows)
    )
    return rows if whole else []


def _is_measured(row: Any) -> bool:
    """Whether the values of a row that figures and captions need are there, and of their types."""
    return (
        isinstance(row, dict)
        and isinstance(row.get("averager"), str)
        and all(row.get(key) is not None and is_number(row[key]) for key in ("round", "bits_sent"))
        and "squared_error" in row
        and all(is_number(row.get(key)) for key in ("squared_error", "step_size"))
        and isinstance(row.get("shape", []), list)
    )


def _runs(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each run: rounds start again with the next one."""
    runs: list[list[Row]] = []
    for row in rows:
        if not runs or row["round"] <= runs[-1][-1]["round"]:
            runs.append([])
        runs[-1].append(row)
    return runs


def reaching(run: Sequence[Row], target: float) -> Row | None:
    """The first row whose error is at most `target` times that at the start; None if there is none."""
    enough = target * run[0]["squared_error"]
    return next((row for row in run if row["squared_error"] is not None and row["squared_error"] <= enough), None)


def best(runs: Sequence[Sequence[Row]], target: float) -> Sequence[Row]:
    """The run that reaches the target with the fewest bits; if none reaches it, the run of smallest error."""

    def cost(run: Sequence[Row]) -> tuple[float, float]:
        reached, last = reaching(run, target), run[-1]["squared_error"]
        return (math.inf if reached is None else reached["bits_sent"], math.inf if last is None else last)

    return min(runs, key=cost)


def best_of_each(rows: Sequence[Row], target: float) -> dict[str, Sequence[Row]]:
    """The best run of each averager in the rows of an experiment, by label: the run with its best step size.

    Rows of a sweep may differ in workers, data, shape or seed: then each of these has its own best run, and is named.
    """
    differing = [key for key in SETTING if len({repr(row.get(key)) for row in rows}) > 1]
    by_averager: dict[str, list[list[Row]]] = {}
    for run in _runs(rows):
        name = re.sub(rf"\b{STEP_SIZE}, |(?:, )?\b{STEP_SIZE}", "", run[0]["averager"])
        words = [SETTING[key](run[0][key]) for key in differing if key in run[0]]
        by_averager.setdefault(", ".join([name, *words]), []).append(run)
    chosen: dict[str, Sequence[Row]] = {}
    for name, tried in by_averager.items():
        found = best(tried, target)
        step_size = found[0].get("step_size")
        chosen[name if step_size is None else f"{name}, step size {step_size:g}"] = found
    return chosen


def experiment(rows: Sequence[Row]) -> str:
    """What was run, in a sentence.

    Example:
        >>> experiment([{"round": 9, "workers": 8, "data": "digits", "shape": [64, 64], "seed": 0}])
        '9 rounds, 8 workers, digits data, 64 x 64, seed 0'
    """
    parts = [f"{max(row['round'] for row in rows)} rounds"]
    for key, words in SETTING.items():
        parts.append(" and ".join(dict.fromkeys(words(row[key]) for row in rows if key in row)))
    return ", ".join(filter(None, parts))


def error_lines(runs: Mapping[str, Sequence[Row]], x: str, target: float) -> Figure:
    """Draw the squared error, relative to the start, against "bits" or "rounds"."""
    figure = new_figure(layout="constrained")
    axes = figure.add_subplot()
    _draw(axes, runs, x, target)
    axes.set_ylabel("squared error / that at the start")
    add_legend(axes, height=3.5)
    return figure


def error_against_bits(runs: Mapping[str, Sequence[Row]], path: Path, target: float, title: str) -> None:
    """Draw the squared error, relative to the start, against bits on the left and rounds on the right.

    Args:
        runs: label -> rows with `round`, `bits_sent` and `squared_error`, the latter None if it was not finite.
        path: where to write; the suffix chooses the format (.png, .pdf, .svg).
        target: relative error at which a dotted line is drawn.
        title: the title above the panels.
    """
    with styled():
        figure = new_figure(10, 4.6 + 0.11 * len(runs), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        for axes, x in zip(panels, ("bits", "rounds"), strict=True):
            _draw(axes, runs, x, target)
        panels[0].set_ylabel("squared error / that at the start")
        figure.suptitle(title, fontsize=10.5, x=0.02, ha="left")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=2, frameon=False)
    save(figure, path)


def _points(rows: Sequence[Row], x: str) -> tuple[list[float], list[float]]:
    """The points of a line, without round 0 on the axis of bits: it has sent nothing, and the axis is logarithmic."""
    known = [row for row in rows if row["squared_error"] is not None and (x == "rounds" or row["bits_sent"])]
    xs = [row["round"] if x == "rounds" else row["bits_sent"] / 1e6 for row in known]
    return xs, [max(row["squared_error"] / rows[0]["squared_error"], FLOOR) for row in known]


def _draw(axes: Axes, runs: Mapping[str, Sequence[Row]], x: str, target: float) -> None:
    """Draw a line for each run, and the target."""
    for number, (label, rows) in enumerate(runs.items()):
        axes.plot(*_points(rows, x), label=label, **line_style(number))
    axes.margins(x=0.02)
    heights = [np.asarray(line.get_ydata(), dtype=float) for line in axes.lines]
    low = min((float(height.min()) for height in heights if height.size), default=FLOOR)
    axes.set_ylim(low / 3, 3)
    logarithmic(axes, "y")
    if x == "bits":
        logarithmic(axes, "x")
    axes.axhline(target, color=GREY, linewidth=1, linestyle=":")
    axes.set_xlabel("sent by all workers together (Mbit, log scale)" if x == "bits" else "rounds")
    plain_axes(axes, "both")
