"""The figure of the demo: test accuracy against bytes sent, with one curve per run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from .runs import Run
from .style import COLOURS, GREY, new_figure, plain_axes, save

CROWDED_DECADES = 0.55  # the labels of ends that are closer than this point away from each other


def accuracy_against_bytes(runs: Sequence[Run], path: Path) -> None:
    """Draw test accuracy during training against the bytes that a worker has sent: left is cheaper, up is better.

    Args:
        runs: finished runs of more than one worker.
        path: where to write; the suffix chooses the format (.png, .pdf, .svg).
    """
    figure = new_figure(8.4, 4.8, layout="constrained")
    axes = figure.add_subplot()
    curves = [_curve(run) for run in runs]
    for curve, colour in zip(curves, COLOURS, strict=False):
        axes.plot(*curve, color=colour, linewidth=2, solid_capstyle="round")
        axes.plot(curve[0][-1], curve[1][-1], "o", color=colour, markersize=8, markeredgecolor="white")
    _label_ends(axes, runs, curves)
    _style(axes, curves)
    save(figure, path)


def _curve(run: Run) -> tuple[list[float], list[float]]:
    """Megabytes and per cent at the end of each epoch."""
    tested = [row for row in run.rows if "test_accuracy" in row]
    return [row["bytes_sent"] / 1e6 for row in tested], [100 * row["test_accuracy"] for row in tested]


def _label_ends(axes, runs: Sequence[Run], curves: Sequence[tuple[list[float], list[float]]]) -> None:
    """Write name, bytes and accuracy above the end of each curve, in its colour."""
    ends = [math.log10(megabytes[-1]) for megabytes, _ in curves]
    for run, (megabytes, percent), end, colour in zip(runs, curves, ends, COLOURS, strict=False):
        fewer = run.summary["compression_vs_fp32"]
        cost = f"{megabytes[-1]:.3g} MB" + (f", {fewer:.0f}× fewer" if fewer > 1.05 else "")
        side = _side(end, ends)
        style = {"xy": (megabytes[-1], 100), "textcoords": "offset points", "ha": side, "va": "bottom"}
        shift = {"left": -4, "right": 4, "center": 0}[side]
        plain = {"color": colour, "weight": "bold", "fontsize": 10.5, "parse_math": False}
        axes.annotate(run.label, xytext=(shift, 29), **plain, **style)
        axes.annotate(f"{cost}\n{percent[-1]:.1f} %", xytext=(shift, 4), color=GREY, fontsize=8.5, **style)


def _side(end: float, ends: Sequence[float]) -> str:
    """Horizontal alignment of a label above `end`, away from a close neighbour."""
    if any(0 < other - end < CROWDED_DECADES for other in ends):
        return "right"
    return "left" if any(0 < end - other < CROWDED_DECADES for other in ends) else "center"


def _style(axes, curves: Sequence[tuple[list[float], list[float]]]) -> None:
    # The axis reaches down to the worst run's best accuracy. Steep first epochs may be cut off.
    lowest = min(max(percent) for _, percent in curves)
    axes.set_ylim(max(0, min(80, lowest - 10)), 100)
    axes.set_xscale("log")
    axes.set_xlabel("sent by each worker, in megabytes (log scale)")
    axes.set_ylabel("test accuracy, in per cent")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.get_major_locator().set_params(steps=[1, 2, 5, 10])
    axes.margins(x=0.08)
    plain_axes(axes)
