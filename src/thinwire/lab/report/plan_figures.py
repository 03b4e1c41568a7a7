"""Figures of a plan: the step's time by bandwidth, and by number of workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ...plan import Method, Network, Speeds, Workload, predict_method
from .style import GREY, SMALL, line_style, logarithmic, new_figure, plain_axes, save, styled

NUM_BEST = 5
WORTH = 1.02
"""How many times as fast as dense training a method must be to be worth a change."""
RATES = tuple(float(rate) / 8 for rate in np.logspace(7, 11, 17))
"""Bytes per second: 10 Mb/s to 100 Gb/s."""

Curves = dict[str, list[float]]


def draw_by_rate(
    path: Path, workload: Workload, network: Network, speeds: Speeds, candidates: Sequence[Method]
) -> None:
    """Draw the step of the best five candidates by bandwidth, with the points where another method becomes the fastest."""
    networks = [replace(network, outer=replace(network.outer, bytes_per_second=rate)) for rate in RATES]
    curves = _curves(workload, networks, speeds, candidates)
    megabits = [8 * rate / 1e6 for rate in RATES]
    _draw(path, best(curves), megabits, "bandwidth between nodes, Mb/s", crossings(curves, megabits))


def draw_by_workers(
    path: Path, workload: Workload, network: Network, speeds: Speeds, candidates: Sequence[Method]
) -> None:
    """Draw the step of the best five candidates by number of workers, from 2 nodes to 64."""
    sizes = [network.workers_per_node * 2**i for i in range(1, 7)]
    curves = _curves(workload, [replace(network, workers=size) for size in sizes], speeds, candidates)
    _draw(path, best(curves), sizes, "workers", [])


def _curves(workload: Workload, networks: Sequence[Network], speeds: Speeds, candidates: Sequence[Method]) -> Curves:
    return {m.name: [predict_method(m, workload, network, speeds)[0] for network in networks] for m in candidates}


def best(curves: Curves, number: int = NUM_BEST) -> Curves:
    """The methods that are the fastest at some point, then those whose step is shortest on average, in logarithms.

    Example:
        >>> best({"a": [1.0, 4.0], "b": [2.0, 1.0], "c": [1.1, 1.1]}, 2)
        {'a': [1.0, 4.0], 'b': [2.0, 1.0]}
    """
    points = range(len(next(iter(curves.values()))))
    winners = dict.fromkeys(fastest(curves, i) for i in points)
    others = sorted(curves.keys() - winners, key=lambda name: float(np.log(curves[name]).mean()))
    chosen = [*winners, *others][: max(number, len(winners))]
    return {name: seconds for name, seconds in curves.items() if name in chosen}


def fastest(curves: Curves, point: int) -> str:
    """The first method whose step is within 2 % of the shortest: dense training where nothing is worth a change.

    Example:
        >>> fastest({"dense": [1.01], "other": [1.0]}, 0)
        'dense'
    """
    shortest = min(seconds[point] for seconds in curves.values())
    return next(name for name, seconds in curves.items() if seconds[point] <= WORTH * shortest)


def crossings(curves: Curves, points: Sequence[float]) -> list[tuple[float, str]]:
    """Where another method becomes the fastest, and which: by straight lines in logarithms between the points.

    Example:
        >>> [(round(rate), name) for rate, name in crossings({"a": [1, 1], "b": [10, 0.1]}, [1, 100])]
        [(10, 'b')]
    """
    found = []
    names = [fastest(curves, i) for i in range(len(points))]
    for i, (below, above) in enumerate(zip(names[:-1], names[1:], strict=True)):
        if below != above:
            # The lines cross where the logarithm of their ratio is 0.
            start, end = (float(np.log(curves[above][j] / curves[below][j])) for j in (i, i + 1))
            part = min(1.0, max(0.0, start / (start - end))) if start != end else 0.0
            found.append((float(points[i] * (points[i + 1] / points[i]) ** part), above))
    return found


def _draw(path: Path, curves: Curves, x: Sequence[float], label: str, changes: list[tuple[float, str]]) -> None:
    with styled():
        figure = new_figure(height=4.2, layout="constrained")
        axes = figure.subplots()
        for number, (name, seconds) in enumerate(curves.items()):
            axes.plot(x, seconds, label=name, marker=".", **line_style(number))
        for at, name in changes:
            axes.axvline(at, color=GREY, linewidth=0.7)
            behind = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
            place: dict[str, Any] = {
                "transform": axes.get_xaxis_transform(),
                "rotation": 90,
                "va": "top",
                "ha": "right",
            }
            axes.text(at, 0.98, name, color=GREY, fontsize=SMALL, bbox=behind, **place)
        axes.set(xlabel=label, ylabel="predicted step, seconds")
        logarithmic(axes, "x")
        logarithmic(axes, "y")
        plain_axes(axes, "both")
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=SMALL)
    save(figure, path)
