"""Line figures: a metric against epochs, bytes or seconds, and the adaptive levels of a quantizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import itemgetter, methodcaller
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .groups import Group
from .legend import add_legend
from .mean_curve import Curve, curve
from .metrics import Metric
from .runs import Run
from .style import COLOURS, GREY, SMALL, WIDTH, end_style, line_style, logarithmic, new_figure, plain_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN = 0.25  # the largest part of a curve that may be cut off: the first steps, which are similar for all methods


class Axis(NamedTuple):
    """An x axis: its label, how to read x from a row, and whether it is logarithmic."""

    label: str
    read: Callable[[dict[str, Any]], float | None]
    is_log: bool = False


def along_epochs(groups: Sequence[Group]) -> Axis:
    """Epochs, or steps if the rows have no epochs."""
    if all("epoch" in row for group in groups for run in group.runs for row in run.rows):
        return Axis("epochs", itemgetter("epoch"))
    return Axis("steps", itemgetter("step"))


def _megabytes(row: dict[str, Any]) -> float | None:
    """Megabytes sent; None before the first byte, because the axis is logarithmic."""
    return row["bytes_sent"] / 1e6 if row.get("bytes_sent") else None


ALONG_BYTES = Axis("sent by each worker (MB, log scale)", _megabytes, is_log=True)
ALONG_SECONDS = Axis("time since the first step, measured (s)", methodcaller("get", "seconds"))
ALONG_VIRTUAL_SECONDS = Axis("time on the network that --network describes (s)", methodcaller("get", "virtual_seconds"))


def lines(groups: Sequence[Group], axis: Axis, y: Metric, log_y: bool = False) -> Figure | None:
    """Draw one line per method: the mean over seeds, with a band of one standard deviation to either side.

    Args:
        groups: one per method; a method without the metric has no line.
        axis: along x.
        y: along y.
        log_y: whether y is logarithmic; values that are not positive are left out.

    Returns:
        The figure; None if no group has such a line.
    """
    # A method keeps its number, and with it its colour, in figures where others have no line.
    curves = {i: curve(group.runs, axis.read, y.key, y.scale) for i, group in enumerate(groups)}
    drawn = {i: found for i, found in curves.items() if found is not None and np.isfinite(found.y).any()}
    if log_y:
        drawn = {i: _positive(found) for i, found in drawn.items() if (found.y > 0).any()}
    if not drawn:
        return None
    figure = new_figure(layout="constrained")
    axes = figure.add_subplot()
    for i, found in drawn.items():
        _draw(axes, found, groups[i].label, line_style(i) | end_style(i), log_y)
    _finish(axes, axis, y, list(drawn.values()), log_y)
    if not log_y and all((found.y[np.isfinite(found.y)] % 1 == 0).all() for found in drawn.values()):
        axes.locator_params(axis="y", integer=True)  # numbers of workers
    add_legend(axes, height=3.0)
    return figure


def _positive(found: Curve) -> Curve:
    kept = found.y > 0
    return Curve(found.x[kept], found.y[kept], found.std[kept])


def _draw(axes: Axes, found: Curve, label: str, style: dict[str, Any], log_y: bool) -> None:
    axes.plot(found.x, found.y, label=label, markevery=[_last(found)], **style)
    if found.std.any():
        lower = found.y - found.std
        if log_y:  # zero and less have no place on a logarithmic axis
            lower = np.maximum(lower, found.y / 100)
        axes.fill_between(found.x, lower, found.y + found.std, color=style["color"], alpha=0.18, linewidth=0)


def _last(found: Curve) -> int:
    """The index of the last point that is finite: where a line ends."""
    return int(np.flatnonzero(np.isfinite(found.y))[-1])


def _finish(axes: Axes, axis: Axis, y: Metric, curves: Sequence[Curve], log_y: bool) -> None:
    axes.margins(x=0.02)
    if not log_y:
        _look_at_the_end(axes, y, curves)
    if axis.is_log:
        logarithmic(axes, "x")
    if log_y:
        logarithmic(axes, "y")
    axes.set_xlabel(axis.label)
    axes.set_ylabel(y.label + (" (log scale)" if log_y else ""))
    plain_axes(axes)


def _look_at_the_end(axes: Axes, y: Metric, curves: Sequence[Curve]) -> None:
    """Cut off the first steps if they would leave little space for the rest."""
    if y.higher_is_better is None:
        return
    finite = [found.y[np.isfinite(found.y)] for found in curves]
    low, high = axes.get_ylim()
    if y.higher_is_better:
        low = max(low, min(np.quantile(values, SHOWN) for values in finite) - 0.05 * (high - low))
    else:
        high = min(high, max(np.quantile(values, 1 - SHOWN) for values in finite) + 0.05 * (high - low))
    axes.set_ylim(low, min(high, 101.0) if y.unit == "%" else high)


def levels(groups: Sequence[Group]) -> Figure | None:
    """Draw adaptive levels against steps: one panel per method, and one line per level and seed.

    Most levels are close to zero, so the axis is logarithmic on both sides, beyond the smallest level that is not zero.
    """
    found = [(i, group.label, list(filter(None, map(_levels_of, group.runs)))) for i, group in enumerate(groups)]
    known = [(i, label, runs) for i, label, runs in found if runs]
    if not known:
        return None
    smallest = min(np.abs(heights[heights != 0]).min() for _, _, runs in known for _, heights in runs)
    figure = new_figure(WIDTH, 0.5 + 1.9 * len(known), layout="constrained")
    panels = figure.subplots(len(known), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (i, label, runs) in zip(panels, known, strict=True):
        for steps, heights in runs:  # levels hold from an update to the next
            axes.plot(steps, heights, color=COLOURS[i % len(COLOURS)], linewidth=1.1, drawstyle="steps-post")
        axes.set_title(label, fontsize=SMALL, loc="left", color=GREY)
        axes.set_ylabel("level")
        _on_both_sides(axes, float(smallest))
        plain_axes(axes)
    panels[-1].set_xlabel("steps")
    return figure


def _levels_of(run: Run) -> tuple[list[int], np.ndarray] | None:
    """Steps, and the levels at each of them."""
    rows = [row for row in run.rows if isinstance(row.get("levels"), list) and any(row["levels"])]
    if not rows or len({len(row["levels"]) for row in rows}) > 1:
        return None
    return [row["step"] for row in rows], np.array([row["levels"] for row in rows], dtype=float)


def _on_both_sides(axes: Axes, smallest: float) -> None:
    """A logarithmic axis for numbers of both signs, up to 1, that is linear below the smallest."""
    least = math.floor(math.log10(smallest))
    axes.set_yscale("symlog", linthresh=10.0**least, linscale=0.5)
    powers = [10.0**e for e in range(least, 1)][:: max(1, -(least // 4))]
    ticks = [*(-p for p in powers), 0.0, *powers]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(-1.2, 1.2)
