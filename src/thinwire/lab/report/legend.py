"""The legend of a line figure: one line of text for each method, above the axes."""

from __future__ import annotations

from textwrap import fill
from typing import TYPE_CHECKING

from .style import SMALL

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_CHARACTERS = 62  # in a line of the legend; as many as fit in a figure's width
LINE_INCHES = 0.155


def add_legend(axes: Axes, height: float) -> None:
    """Add a legend with the labels of all lines, and make the figure high enough for it.

    Args:
        axes: the only axes of a figure with constrained layout.
        height: height of the figure without the legend, in inches.
    """
    handles, labels = axes.get_legend_handles_labels()
    labels = [fill(label, MAX_CHARACTERS, break_on_hyphens=False) for label in labels]
    num_lines = sum(label.count("\n") + 1 for label in labels)
    figure = axes.get_figure(root=True)
    assert figure is not None  # the caller drew on one
    figure.set_figheight(height + LINE_INCHES * num_lines)
    style = {"frameon": False, "fontsize": SMALL, "handlelength": 2.4, "labelspacing": 0.25, "borderpad": 0.1}
    figure.legend(handles, labels, loc="outside upper left", **style)
