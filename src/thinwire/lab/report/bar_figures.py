"""Figures of speed: the time of a step by phase, and the speed and the time of one, against the number of workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from statistics import mean, median, stdev
from textwrap import fill
from typing import TYPE_CHECKING, NamedTuple

from .groups import Group
from .legend import add_legend
from .runs import Run
from .style import GREY, SMALL, WIDTH, line_style, new_figure, plain_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PHASES = {
    "data_seconds": ("data", "#999999"),
    "compute_seconds": ("compute", "#0072B2"),
    "encode_seconds": ("encode", "#E69F00"),
    "wait_seconds": ("wait", "#D55E00"),
    "decode_seconds": ("decode", "#009E73"),
}


def step_time(runs: Sequence[Run]) -> dict[str, float]:
    """Milliseconds of a mean step by phase: the measured seconds over the number of steps, averaged over runs."""
    each = [found for found in map(_step_time, runs) if found]
    # A phase that some runs did not measure has no mean over all of them.
    return {key: mean(found[key] for found in each) for key in PHASES if each and all(key in found for found in each)}


def _step_time(run: Run) -> dict[str, float]:
    steps = run.rows[-1]["step"]
    measured = [key for key in PHASES if steps and any(key in row for row in run.rows)]
    return {key: 1e3 * sum(row.get(key) or 0.0 for row in run.rows) / steps for key in measured}


def step_times(groups: Sequence[Group]) -> Figure | None:
    """Draw one bar per method, divided into its phases."""
    known = [(fill(group.label, 56, break_on_hyphens=False), step_time(group.runs)) for group in groups]
    known = [(label, times) for label, times in known if times]
    if not known:
        return None
    tops = [0.0]  # in points; a label is above its bar
    for label, _ in known:
        tops.append(tops[-1] + 1.25 * SMALL * (label.count("\n") + 1) + 24)
    whole = tops[-1] + 66
    figure = new_figure(WIDTH, whole / 72)
    axes = figure.add_axes((0.03, 40 / whole, 0.94, tops[-1] / whole))
    for (label, times), top, below in zip(known, tops, tops[1:], strict=False):
        axes.text(0, top + 3, label, va="top", fontsize=SMALL, linespacing=1.15)
        left = 0.0
        for key, width in times.items():
            axes.barh(below - 13, width, left=left, height=12, color=PHASES[key][1], edgecolor="white", linewidth=0.6)
            left += width
    axes.set_ylim(tops[-1], 0)
    axes.set_yticks([])
    axes.set_xlim(0, 1.02 * max(sum(times.values()) for _, times in known))
    axes.set_xlabel("mean step (ms)")
    plain_axes(axes, grid="x")
    _key(axes, [key for key in PHASES if any(key in times for _, times in known)])
    return figure


def _key(axes: Axes, phases: Sequence[str]) -> None:
    """Write the name of each phase beside its colour, because bars are too short for names."""
    from matplotlib.patches import Patch

    handles = [Patch(color=PHASES[key][1], label=PHASES[key][0]) for key in phases]
    style = {"ncols": len(handles), "frameon": False, "fontsize": SMALL, "handlelength": 1.0, "columnspacing": 1.4}
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(-0.01, 1.0), borderaxespad=0.3, **style)


class Point(NamedTuple):
    """A quantity on a number of workers: mean and standard deviation over seeds."""

    workers: int
    mean: float
    std: float


Measure = Callable[[Run], float | None]


def speed(run: Run) -> float | None:
    """Examples per second: the median over the rows, which slow first steps and tests hardly change."""
    rates = [row["examples_per_second"] for row in run.rows if row.get("examples_per_second")]
    return median(rates) if rates else None


def iteration_time(run: Run, key: str = "seconds") -> float | None:
    """Milliseconds of a step, the next one's begin included: the median over the intervals between two rows.

    Args:
        run: with rows.
        key: of the time in a row; "virtual_seconds" is that on the network of `--network`.
    """
    # Training begins at step 0 and second 0, so the first row ends an interval too.
    rows = [row for row in run.rows if row.get(key) is not None]
    # With a quorum, the row of a test may follow another one without a step between them.
    times = [
        1e3 * (b[key] - a[key]) / (b["step"] - a["step"])
        for a, b in pairwise([{"step": 0, key: 0.0}, *rows])
        if b["step"] > a["step"]
    ]
    return median(times) if times else None


def by_workers(runs: Sequence[Run], measure: Measure) -> list[Point]:
    """The quantity for each number of workers, in ascending order."""
    by_size: dict[int, list[float]] = {}
    for run in runs:
        value = measure(run)
        if value is not None and isinstance(run.config.get("workers"), int):
            by_size.setdefault(run.config["workers"], []).append(value)
    return [Point(n, mean(r), stdev(r) if len(r) > 1 else 0.0) for n, r in sorted(by_size.items())]


def scaling(groups: Sequence[Group]) -> Figure | None:
    """Draw examples per second against workers, with the line of ideal scaling; None for one number of workers."""
    return _against_workers(groups, speed, "examples a second, all workers (log scale)", rises=True)


def iteration_times(groups: Sequence[Group], key: str) -> Figure | None:
    """Draw milliseconds of a step against workers, which a method that scales keeps flat; None for one number of workers."""
    return _against_workers(groups, partial(iteration_time, key=key), "time per iteration (ms)", rises=False)


def _against_workers(groups: Sequence[Group], measure: Measure, label: str, rises: bool) -> Figure | None:
    """Draw a quantity against workers; one that rises with them on a logarithmic axis, with the ideal."""
    methods = _methods(groups, measure)
    known = [(i, label, points) for i, (label, points) in enumerate(methods) if len(points) > 1]
    if not known:
        return None
    figure = new_figure(layout="constrained")
    axes = figure.add_subplot()
    for i, method, points in known:
        style, sizes, means = line_style(i), [p.workers for p in points], [p.mean for p in points]
        axes.plot(sizes, means, label=method, marker="o", markersize=4.5, markeredgecolor="white", **style)
        spreads = [min(p.std, 0.99 * p.mean) for p in points]  # zero has no place on a logarithmic axis
        axes.errorbar(sizes, means, spreads, fmt="none", ecolor=style["color"], elinewidth=1)
    if rises:
        _draw_ideal(axes, [points for _, _, points in known])
        _logarithmic_in_twos(axes)
    else:
        axes.set_ylim(bottom=0)
    _workers_axis(axes, sorted({p.workers for _, _, points in known for p in points}))
    axes.minorticks_off()
    axes.set_ylabel(label)
    plain_axes(axes)
    add_legend(axes, height=3.2)
    return figure


def _methods(groups: Sequence[Group], measure: Measure) -> list[tuple[str, list[Point]]]:
    """The groups without the number of workers in their methods."""
    runs: dict[str, list[Run]] = {}
    for group in groups:
        runs.setdefault(group.without("workers").label, []).extend(group.runs)
    return [(label, by_workers(members, measure)) for label, members in runs.items()]


def _draw_ideal(axes: Axes, methods: Sequence[Sequence[Point]]) -> None:
    """Draw speed in proportion to the workers, from the fastest method at the smallest number of workers."""
    fewest, most = min(m[0].workers for m in methods), max(m[-1].workers for m in methods)
    start = max(m[0].mean for m in methods if m[0].workers == fewest)
    ideal = [start, start * most / fewest]
    axes.plot([fewest, most], ideal, label="ideal", color=GREY, linewidth=1, linestyle=(0, (2, 2)))


def _workers_axis(axes: Axes, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.set_xlabel("workers (log scale)")


def _logarithmic_in_twos(axes: Axes) -> None:
    from matplotlib.ticker import LogLocator

    axes.set_yscale("log", base=2)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high)
    steps = (1, 2, 5) if math.log2(high / low) < 8 else (1,)
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=steps))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
