"""Names of lines at their ends, in place of a legend: none overlaps another.

Where lines end together at the right, their names stand in a column beside them, as near to the ends as they can. Where
lines end apart, such as against bytes, each name stands above the axes, as a flag at a pole on the end of its line. The
axes are as large as the names leave them, and the figure grows where there are many.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from .style import INK, SMALL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Text

GAP = 4.0  # between neighbours, in points
POLES_APART = 4.0  # in points
SAME_END = 0.04  # of the axis: ends that lie closer are at one place


class End(NamedTuple):
    """The end of a line: its name, where it is in data, and its colour."""

    label: str
    x: float
    y: float
    colour: str


class Box(NamedTuple):
    """A name's place, in points from the figure's lower left corner."""

    left: float
    bottom: float
    width: float
    height: float

    def overlaps(self, other: Box) -> bool:
        """Whether two boxes share any of the page."""
        across = self.left < other.left + other.width and other.left < self.left + self.width
        return across and self.bottom < other.bottom + other.height and other.bottom < self.bottom + self.height


def wrapped(label: str, width: int) -> str:
    """Break a name after commas and, where a part is too long, at spaces and before the arguments of nested calls.

    Example:
        >>> print(wrapped("Mean(chain(TopK(ratio=0.005), QSGD(bits=4)), ErrorFeedback()), 4 workers", 26))
        Mean(chain(
        TopK(ratio=0.005),
        QSGD(bits=4)),
        ErrorFeedback()),
        4 workers
    """
    lines = [""]
    for part in re.findall(r"(?:[^,]|,(?! )|, (?=\d+[,)]))+,? ?", label):  # a list of numbers stays together
        for piece in re.findall(r"\w+\((?=\w+=?\()|(?:[^ ]| (?=\d+[,)]))+ ?", part) if len(part.strip()) > width else [part]:
            if lines[-1] and len((lines[-1] + piece).rstrip()) > width:
                lines.append("")
            lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)


def spread(wanted: Sequence[float], heights: Sequence[float]) -> list[float]:
    """Centres as near to those wanted as can be (least squares), in their order, with none overlapping.

    Example:
        >>> spread([0, 1, 50], [10, 10, 10])
        [-4.5, 5.5, 50.0]
    """
    order = sorted(range(len(wanted)), key=lambda i: (wanted[i], i))
    blocks: list[tuple[float, float, list[int]]] = []  # sum of wanted lower edges, height, members
    for i in order:
        block = (wanted[i] - heights[i] / 2, heights[i], [i])
        while blocks and blocks[-1][0] / len(blocks[-1][2]) + blocks[-1][1] > block[0] / len(block[2]):
            total, height, members = blocks.pop()
            # Lower edges of the later members, as if the block began at the first of the earlier.
            block = (total + block[0] - height * len(block[2]), height + block[1], members + block[2])
        blocks.append(block)
    centres = [0.0] * len(wanted)
    for total, _, members in blocks:
        lower = total / len(members)
        for i in members:
            centres[i], lower = lower + heights[i] / 2, lower + heights[i]
    return centres


def label_ends(axes: Axes, ends: Sequence[End], height: float) -> None:
    """Name lines at their ends, and lay the figure out around them.

    Args:
        axes: the only ones of their figure, with limits and labels as they are to stay.
        ends: of all lines.
        height: of the axes, in inches; more where the names need it.
    """
    beside, above = _sorted_out(axes, ends)
    texts = [_text(axes, wrapped(end.label, 24), end) for end in beside]
    widths, heights = _sizes(texts)
    margins = {
        "right": max(widths) + 20 if beside else 12.0,
        "height": max(72 * height, sum(h + GAP for h in heights)),
    }
    names = [_text(axes, wrapped(end.label, 34), end) for end in above]
    _make_room(axes, _frame(axes, top=8, **margins), above, names)
    flags = _flags(axes, above, names)
    frame = _frame(axes, top=8 + max((flag.box.bottom + flag.box.height for flag in flags), default=0), **margins)
    _draw_column(axes, frame, beside, texts, heights)
    _draw_flags(axes, frame, above, flags)


def _sorted_out(axes: Axes, ends: Sequence[End]) -> tuple[list[End], list[End]]:
    """Ends that have their names beside them: two or more, or all, at the right of the axes; and the others."""
    transform = axes.xaxis.get_transform()
    (low, high), places = (transform.transform(x) for x in (axes.get_xlim(), [end.x for end in ends]))
    is_last = [max(places) - place <= SAME_END * (high - low) for place in places]
    is_last = [yes and (sum(is_last) > 1 or len(ends) == 1) for yes in is_last]
    pairs = list(zip(ends, is_last, strict=True))
    return [end for end, yes in pairs if yes], [end for end, yes in pairs if not yes]


def _draw_column(
    axes: Axes, frame: Box, ends: Sequence[End], texts: Sequence[Text], heights: Sequence[float]
) -> None:
    """Names to the right, from the top to the bottom as the lines end."""
    places = [_in_points(axes, end) for end in ends]
    centres = _within(spread([y for _, y in places], [h + GAP for h in heights]), heights, frame)
    edge = frame.left + frame.width
    for text, end, (x, y), centre, size in zip(texts, ends, places, centres, heights, strict=True):
        _line(axes, [(x, y), (edge + 4, y), (edge + 11, centre), (edge + 14, centre)], end.colour)
        _place(axes, text, edge + 17, centre - size / 2)


def _within(centres: Sequence[float], heights: Sequence[float], frame: Box) -> list[float]:
    """Push names that reach past the axes back, and their neighbours before them."""
    moved, order = list(centres), sorted(range(len(centres)), key=lambda i: centres[i])
    edge = frame.bottom - GAP
    for i in order:
        moved[i] = max(moved[i], edge + heights[i] / 2 + GAP)
        edge = moved[i] + heights[i] / 2
    edge = frame.bottom + frame.height + GAP
    for i in reversed(order):
        moved[i] = min(moved[i], edge - heights[i] / 2 - GAP)
        edge = moved[i] - heights[i] / 2
    return moved


def _make_room(axes: Axes, frame: Box, ends: Sequence[End], texts: Sequence[Text]) -> None:
    """Begin a logarithmic axis further to the left, where names would not fit to the left of their poles."""
    if axes.get_xscale() != "log":
        return
    widths, _ = _sizes(texts)
    transform = axes.xaxis.get_transform()
    low, high = transform.transform(axes.get_xlim())
    lows = [low]
    for end, width in zip(ends, widths, strict=True):
        share = min(0.4, (width + 8 - frame.left) / frame.width)  # of the axis, to the left of this pole
        lows.append((transform.transform([end.x])[0] - share * high) / (1 - share))
    axes.set_xlim(transform.inverted().transform([min(lows), high]))


class Flag(NamedTuple):
    """A name above the axes: its text, the x of its pole, and its box, in points from the top of the axes."""

    text: Text
    pole: float
    box: Box


def _flags(axes: Axes, ends: Sequence[End], texts: Sequence[Text]) -> list[Flag]:
    """Names extend to the left of their poles. The leftmost is the lowest, so that other poles pass to its right."""
    widths, heights = _sizes(texts)
    poles = spread([_in_points(axes, end)[0] for end in ends], [POLES_APART] * len(ends))
    boxes: dict[int, Box] = {}
    for i in sorted(range(len(ends)), key=lambda i: poles[i]):
        left = max(4.0, poles[i] - widths[i] - 3)
        # Above the names that this pole would cross, and above those whose poles would cross this name.
        met = [b for j, b in boxes.items() if b.left < poles[i] < b.left + b.width or left - 2 < poles[j]]
        level = max((b.bottom + b.height for b in met), default=2 * GAP)
        boxes[i] = Box(left, level, widths[i] + GAP, heights[i] + GAP)
        while any(boxes[i].overlaps(other) for j, other in boxes.items() if j != i):
            boxes[i] = boxes[i]._replace(bottom=boxes[i].bottom + 1)
    return [Flag(texts[i], poles[i], boxes[i]) for i in range(len(ends))]


def _draw_flags(axes: Axes, frame: Box, ends: Sequence[End], flags: Sequence[Flag]) -> None:
    top = frame.bottom + frame.height
    for end, (text, pole, box) in zip(ends, flags, strict=True):
        x, y = _in_points(axes, end)
        tip = top + box.bottom + box.height - GAP
        _line(axes, [(x, y), (x, top), (pole, top + 2 * GAP), (pole, tip)], end.colour, width=0.8)
        _place(axes, text, box.left, top + box.bottom)


def _text(axes: Axes, label: str, end: End) -> Text:
    style = {"fontsize": SMALL, "color": INK, "linespacing": 1.15, "va": "bottom", "ha": "left"}
    # Where a pole has to pass behind a name, the name can still be read.
    style["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
    return axes.figure.text(0, 0, label, in_layout=False, **style)


def _sizes(texts: Sequence[Text]) -> tuple[list[float], list[float]]:
    """Widths and heights in points."""
    if not texts:
        return [], []
    figure = texts[0].figure
    renderer = figure.canvas.get_renderer()
    boxes = [text.get_window_extent(renderer) for text in texts]
    return [72 / figure.dpi * box.width for box in boxes], [72 / figure.dpi * box.height for box in boxes]


def _frame(axes: Axes, top: float, right: float, height: float) -> Box:
    """Put the axes where their own labels, and so many points at the right and above, leave room; returns their place."""
    figure = axes.figure
    width = 72 * figure.get_figwidth()
    left, bottom = 48.0, 40.0
    for _ in range(2):  # what the ticks are, and how wide, depends on the size
        figure.set_figheight((bottom + height + top) / 72)
        whole = bottom + height + top
        axes.set_position((left / width, bottom / whole, (width - left - right) / width, height / whole))
        tight = axes.get_tightbbox(figure.canvas.get_renderer())
        left = max(8.0, left + 6 - 72 / figure.dpi * tight.x0)
        bottom = max(8.0, bottom + 6 - 72 / figure.dpi * tight.y0)
    return Box(left, bottom, width - left - right, height)


def _in_points(axes: Axes, end: End) -> tuple[float, float]:
    x, y = axes.transData.transform((end.x, end.y)) * 72 / axes.figure.dpi
    low, high = axes.get_window_extent().intervaly * 72 / axes.figure.dpi
    return float(x), float(min(max(y, low), high))


def _line(axes: Axes, points: Sequence[tuple[float, float]], colour: str, width: float = 1.0) -> None:
    from matplotlib.lines import Line2D

    size = 72 * axes.figure.get_size_inches()
    xs, ys = zip(*((x / size[0], y / size[1]) for x, y in points), strict=True)
    line = Line2D(xs, ys, color=colour, linewidth=width, zorder=1, transform=axes.figure.transFigure, solid_capstyle="butt")
    axes.figure.add_artist(line)


def _place(axes: Axes, text: Text, left: float, bottom: float) -> None:
    size = 72 * axes.figure.get_size_inches()
    text.set_position((left / size[0], bottom / size[1]))


