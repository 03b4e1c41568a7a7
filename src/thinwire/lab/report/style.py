"""The style of all figures: sizes, colours, fonts, axes, and file formats.

Figures are 4.8 inches wide. This is the width of a page's text, and letters stay readable on a small screen. Text stays text
in PDF and SVG.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...algorithm import able_to

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The colours of Okabe and Ito, which differ under all common kinds of colour blindness; the darker ones first.
COLOURS = ("#000000", "#E69F00", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1)))  # after all colours are used
ENDS = ("o", "s", "^")  # markers at the ends of lines with these dashes: a run with one test is a marker alone
GREY, INK, GRID, AXIS = "#666666", "#222222", "#e6e6e6", "#bbbbbb"
FORMATS = (".pdf", ".png", ".svg")
WIDTH = 4.8  # inches
SMALL, NORMAL = 8.0, 9.0  # font sizes in points

_RC: dict[Any, Any] = {  # Matplotlib's own type of this lists the name of every setting
    "font.family": "DejaVu Sans",  # comes with Matplotlib, so figures are the same on all machines
    "font.size": NORMAL,
    "axes.labelsize": NORMAL,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "svg.fonttype": "none",
    "pdf.fonttype": 42,  # TrueType: letters that can be searched and edited
    "text.parse_math": False,  # labels are values of a configuration, where a dollar sign is literal
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
}


@contextmanager
def styled() -> Iterator[None]:
    """Context with the style; make and save figures in it."""
    import matplotlib

    with matplotlib.rc_context(_RC):
        yield


def new_figure(width: float = WIDTH, height: float = 3.2, **options: Any) -> Figure:
    """An empty figure without a window, and without pyplot's global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), **options)
    FigureCanvasAgg(figure)
    return figure


def line_style(number: int) -> dict[str, Any]:
    """Colour and dashes of the line with this number; the first 21 are all different."""
    turn = number // len(COLOURS)
    return {"color": COLOURS[(number + turn) % len(COLOURS)], "linestyle": DASHES[turn % len(DASHES)]}


def end_style(number: int) -> dict[str, Any]:
    """Marker at the end of the line with this number, as `line_style`; the first 21 are all different."""
    marker = ENDS[number // len(COLOURS) % len(ENDS)]
    return {"marker": marker, "markersize": 4.5, "markeredgecolor": "white", "markeredgewidth": 0.8}


def plain_axes(axes: Axes, grid: Literal["both", "x", "y"] = "y") -> None:
    """Draw only the bottom line and a faint grid: no frame and no ticks."""
    axes.grid(axis=grid, color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(colors=GREY, which="both", length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(AXIS)


def logarithmic(axes: Axes, which: str) -> None:
    """Make the axis "x" or "y" logarithmic, with a few ticks at round numbers, all in one form."""
    from matplotlib.ticker import LogLocator, NullLocator

    getattr(axes, f"set_{which}scale")("log")
    axis, (low, high) = getattr(axes, f"{which}axis"), getattr(axes, f"get_{which}lim")()
    decades = high / low
    # Fewer ticks on a longer axis, or labels would overlap; labels along x are wider than those along y are high.
    steps = (1, 2, 5) if decades < 60 else (1, 3) if decades < 600 and which == "y" else (1,)
    axis.set_major_locator(LogLocator(subs=steps, numticks=12 if decades < 600 else 7))
    is_plain = 1e-3 <= low and high < 1e5
    axis.set_major_formatter(lambda value, _: f"{value:g}" if is_plain else _power(value))
    axis.set_minor_locator(NullLocator())


def _power(value: float) -> str:
    """A positive number as a power of ten.

    Example:
        >>> _power(1e-9), _power(2e6), _power(1.0)
        ('10⁻⁹', '2×10⁶', '1')
    """
    digits, exponent = f"{value:.0e}".split("e")
    if int(exponent) == 0:
        return digits
    power = "10" + str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return power if digits == "1" else f"{digits}×{power}"


def check_kind(path: Path) -> None:
    """Check before a measurement that a figure can be saved to `path`.

    Raises:
        ValueError: its suffix is no known format.
    """
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"cannot draw to {path.name!r}: the file must end in {', '.join(FORMATS)}")


def lay_out(figure: Figure) -> None:
    """Fix the places of axes and legend, so that they are the same in all formats and are not computed for each."""
    with styled():
        figure.draw_without_rendering()
    figure.set_layout_engine(None)


def save(figure: Figure, path: Path) -> None:
    """Write a figure; the suffix chooses the format (.png, .pdf, .svg). The same figure gives the same bytes.

    Raises:
        ValueError: another suffix, or the file cannot be written.
    """
    import matplotlib

    check_kind(path)
    kind, drawn = path.suffix.lower()[1:], io.BytesIO()  # on a full disk, Matplotlib's writer of PDF hides the reason
    with styled():
        if kind == "svg":
            # Without a salt, Matplotlib makes random ids.
            with matplotlib.rc_context({"svg.hashsalt": path.stem}):
                figure.savefig(drawn, format=kind, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
        else:
            metadata = {"CreationDate": None} if kind == "pdf" else {}
            figure.savefig(drawn, format=kind, dpi=200, metadata=metadata)
    with able_to(f"write {path}", "choose another file, or free some space"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(drawn.getvalue())
