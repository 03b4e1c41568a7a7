"""Pictures of topologies: workers on a circle, one panel for each step of the period. Needs matplotlib."""

from __future__ import annotations

import io
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from .base import Topology
from .compose import Hierarchical, Links, links_of

FORMATS = (".pdf", ".png", ".svg")
MAX_PANELS = 12
MAX_COLUMNS = 4
MAX_LABELLED = 64
PANEL_INCHES = 2.9
LEADERS_AT = 0.66  # leaders are inside the circle of their members
BEND = 0.5  # of links towards the centre, so that they do not pass behind the workers between
INK, BLUE, ORANGE, GREY = "#333333", "#0072B2", "#D55E00", "#999999"  # by Okabe and Ito, for colour-blind readers


def draw(topology: Topology, size: int, path: str | Path) -> Path:
    """Draw a topology of `size` workers to a PNG, SVG or PDF file, chosen by the suffix of `path`; returns the path.

    Orange arrows are messages one way, blue lines exchanges both ways, grey lines exact averages within a node. A
    time-varying topology has one panel for each step, of which at most twelve are drawn.

    Raises ValueError where the topology cannot connect `size` workers, and for another kind of file.

    Example:
        >>> import tempfile
        >>> from thinwire.topology import Exponential
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     draw(Exponential(), 8, f"{folder}/exponential.svg").name
        'exponential.svg'
    """
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"cannot draw to {path.name!r}: the file must end in {', '.join(FORMATS)}")
    steps = topology.steps(size)
    shown = steps[:MAX_PANELS]
    figure, panels = _panels(len(shown))
    for step, axes in zip(shown, panels, strict=False):  # the last row may have more panels than steps
        _draw_step(axes, topology, step, size)
        if len(steps) > 1:
            axes.set_title(f"step {step}", fontsize=9, color=INK)
    figure.suptitle(_title(topology, size, len(shown), len(steps)), fontsize=11, color=INK)
    drawn = io.BytesIO()  # on a full disk, Matplotlib's writer of PDF hides the reason
    figure.savefig(drawn, format=path.suffix.lower()[1:], dpi=150)
    path.write_bytes(drawn.getvalue())
    return path


def _panels(num_panels: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # pyplot would choose a window system

    columns = min(num_panels, MAX_COLUMNS)
    rows = ceil(num_panels / columns)
    inches = PANEL_INCHES * (1.8 if num_panels == 1 else 1.0)
    figure = Figure(figsize=(columns * inches, rows * inches + 0.4), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in panels:
        axes.set(xlim=(-1.18, 1.18), ylim=(-1.18, 1.18), aspect="equal")
        axes.set_axis_off()
    return figure, panels


def _title(topology: Topology, size: int, num_shown: int, num_steps: int) -> str:
    name = repr(topology)
    name = name if len(name) <= 60 else f"{name[:57]}..."
    part = f" (first {num_shown} of {num_steps} steps)" if num_shown < num_steps else ""
    return f"{name}, {size} worker{'s' * (size > 1)}{part}"


def _draw_step(axes: Any, topology: Topology, step: int, size: int) -> None:
    places = _places(topology, size)
    radius = min(0.13, 2.2 / size)
    between, within = links_of(topology, step, size)
    exchanges = {(a, b) for a, b in between if a < b and (b, a) in between}
    one_way = {(a, b) for a, b in between if (b, a) not in between}
    _draw_links(axes, [places[[a, b]] for a, b in sorted(within)], GREY)
    _draw_links(axes, _curves(places, exchanges), BLUE)
    _draw_links(axes, _curves(places, one_way), ORANGE, arrows_at=radius)
    _draw_workers(axes, places, radius)


def _places(topology: Topology, size: int) -> np.ndarray:
    """The points of the ranks, of shape (size, 2), clockwise from the top, with leaders inside the circle of members."""
    turns, radii = np.arange(size) / size, np.ones(size)
    if isinstance(topology, Hierarchical) and 1 < topology.workers_per_node <= size:
        per_node, nodes = topology.workers_per_node, topology.num_nodes(size)
        node, member = np.divmod(np.arange(size), per_node)
        offsets = np.where(member == 0, 0.0, (member - per_node / 2) / per_node)
        turns, radii = (node + offsets) / nodes, np.where(member == 0, LEADERS_AT, 1.0)
    return np.stack([radii * np.sin(2 * np.pi * turns), radii * np.cos(2 * np.pi * turns)], axis=1)


def _curves(places: np.ndarray, links: Links) -> list[np.ndarray]:
    """A quadratic Bezier curve for each link, bent towards the centre unless its ends are next to each other."""
    size, along = len(places), np.linspace(0, 1, 33)[:, None]
    curves = []
    for sender, receiver in sorted(links):
        a, b = places[sender], places[receiver]
        bend = 0.0 if abs(sender - receiver) in (1, size - 1) else BEND
        control = (a + b) / 2 * (1 - bend)
        curves.append((1 - along) ** 2 * a + 2 * along * (1 - along) * control + along**2 * b)
    return curves


def _draw_links(axes: Any, curves: list[np.ndarray], color: str, arrows_at: float | None = None) -> None:
    from matplotlib.collections import LineCollection, PolyCollection

    points = max(0.3, 1.3 - len(curves) / 300)
    axes.add_collection(LineCollection(curves, colors=color, linewidths=points, zorder=1))
    if arrows_at is not None:
        heads = [_arrow_head(curve, arrows_at) for curve in curves]
        axes.add_collection(PolyCollection(heads, facecolors=color, edgecolors="none", zorder=1.5))


def _arrow_head(curve: np.ndarray, radius: float) -> np.ndarray:
    """A triangle along the curve's end whose tip touches the receiver's rim."""
    receiver = curve[-1]
    outside = curve[np.linalg.norm(curve - receiver, axis=1) > 1.4 * radius]
    way = receiver - outside[-1]
    way /= np.linalg.norm(way)
    tip, length = receiver - way * radius, max(0.02, min(0.07, 0.7 * radius))
    side = np.array([-way[1], way[0]]) * length * 0.45
    return np.stack([tip, tip - way * length + side, tip - way * length - side])


def _draw_workers(axes: Any, places: np.ndarray, radius: float) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Circle

    circles = [Circle(place, radius) for place in places]
    axes.add_collection(PatchCollection(circles, facecolor="white", edgecolor=INK, linewidth=0.8, zorder=2))
    for rank, (x, y) in enumerate(places if len(places) <= MAX_LABELLED else []):
        axes.text(x, y, str(rank), fontsize=min(9, 90 * radius), color=INK, ha="center", va="center_baseline")
