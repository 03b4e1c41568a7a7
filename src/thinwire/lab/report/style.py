"""How every figure looks: sizes, colours, fonts, axes, and the files that it is written to.

Figures are 4.8 inches wide: they fit a page's text as they are, and their letters can still be read where a telephone makes
them smaller. Text stays text in PDF and SVG.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which stay apart under all common kinds of colour blindness; the darker ones first.
COLOURS = ("#000000", "#E69F00", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1)))  # when the colours are used up
GREY, INK, GRID, AXIS = "#666666", "#222222", "#e6e6e6", "#bbbbbb"
FORMATS = (".pdf", ".png", ".svg")
WIDTH = 4.8  # inches
SMALL, NORMAL = 8.0, 9.0  # font sizes in points

_RC = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so that figures are the same everywhere
    "font.size": NORMAL,
    "axes.labelsize": NORMAL,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "svg.fonttype": "none",
    "pdf.fonttype": 42,  # TrueType: letters that can be searched and edited
    "text.parse_math": False,  # labels are values of a configuration, in which a dollar is a dollar
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
}


@contextmanager
def styled() -> Iterator[None]:
    """Context in which figures are made and drawn."""
    import matplotlib

    with matplotlib.rc_context(_RC):
        yield


def new_figure(width: float = WIDTH, height: float = 3.2, **options: Any) -> Figure:
    """An empty figure that no window and no global state knows."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), **options)
    FigureCanvasAgg(figure)
    return figure


def line_style(number: int) -> dict[str, Any]:
    """Colour and dashes of the line with this number: no two of 21 are alike."""
    turn = number // len(COLOURS)
    return {"color": COLOURS[(number + turn) % len(COLOURS)], "linestyle": DASHES[turn % len(DASHES)]}


def plain_axes(axes: Axes, grid: str = "y") -> None:
    """No frame, no ticks: a line below, and a faint grid."""
    axes.grid(axis=grid, color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(colors=GREY, which="both", length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(AXIS)


def logarithmic(axes: Axes, which: str) -> None:
    """A logarithmic axis, "x" or "y", with its ticks at round numbers, a few of them whatever it spans."""
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

    getattr(axes, f"set_{which}scale")("log")
    axis, (low, high) = getattr(axes, f"{which}axis"), getattr(axes, f"get_{which}lim")()
    decades = high / low
    steps = (1, 2, 5) if decades < 60 else (1, 3) if decades < 600 and which == "y" else (1,)
    axis.set_major_locator(LogLocator(subs=steps, numticks=12 if decades < 600 else 7))
    axis.set_major_formatter(_short)
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def _short(value: float, _: int) -> str:
    """Powers of ten far from 1 as such; all else as it is.

    Example:
        >>> _short(0.05, 0), _short(1e-9, 0), _short(2e6, 0)
        ('0.05', '10⁻⁹', '2×10⁶')
    """
    if not value or 1e-3 <= abs(value) < 1e5:
        return f"{value:g}"
    digits, exponent = f"{value:.0e}".split("e")
    power = "10" + str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return power if digits == "1" else f"{digits}×{power}"


def check_kind(path: Path) -> None:
    """Fail before the measurement where no figure can be drawn to `path`.

    Raises:
        ValueError: it ends in something else than a format.
    """
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"cannot draw to {path.name!r}: the file must end in {', '.join(FORMATS)}")


def save(figure: Figure, path: Path) -> None:
    """Write a figure; the suffix chooses the format (.png, .pdf, .svg).

    Raises:
        ValueError: another suffix.
    """
    check_kind(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    suffix = path.suffix.lower()
    with styled():
        if suffix == ".svg":
            with path.open("w", encoding="utf-8") as file:
                save_svg(figure, file, path.stem)
        else:
            # The same figure gives the same bytes.
            figure.savefig(path, dpi=200, metadata={"CreationDate": None} if suffix == ".pdf" else {})


def save_svg(figure: Figure, file: TextIO, name: str) -> None:
    """Write a figure as SVG, with nothing in it that changes from one time to the next."""
    import matplotlib

    with matplotlib.rc_context({**_RC, "svg.hashsalt": name}):
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
