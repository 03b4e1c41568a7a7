"""The figure of a consensus experiment: how close workers are to agreement, for how many bits and after how many rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .figures import COLOURS, GREY

FORMATS = (".pdf", ".png", ".svg")
STYLES = ("-", (0, (5, 1.5)), (0, (1, 1)))  # when the colours are used up
FLOOR = 1e-13  # of the relative error: below it float32 has nothing to say


def check_kind(path: Path) -> None:
    """Fail before the measurement where no figure can be drawn to `path`.

    Raises:
        ValueError: it ends in something else than a format.
    """
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"cannot draw to {path.name!r}: the file must end in {', '.join(FORMATS)}")


def error_against_bits(runs: Mapping[str, Sequence[Mapping[str, Any]]], path: Path, target: float, title: str) -> None:
    """Squared error over that at the start, against bits on the left and against rounds on the right.

    Args:
        runs: label -> rows with `round`, `bits_sent` and `squared_error`, the latter None where it was not finite.
        path: where to write; the suffix chooses the format (.png, .pdf, .svg).
        target: relative error at which a dotted line is drawn.
        title: what stands above.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    check_kind(path)
    height = 4.6 + 0.11 * len(runs)
    figure = Figure(figsize=(10, height), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    by_bits, by_rounds = figure.subplots(1, 2, sharey=True)
    for number, (label, rows) in enumerate(runs.items()):
        turn = number // len(COLOURS)
        style = {"color": COLOURS[(number + turn) % len(COLOURS)], "linestyle": STYLES[turn % len(STYLES)]}
        known = [row for row in rows if row["squared_error"] is not None]
        errors = [max(row["squared_error"] / rows[0]["squared_error"], FLOOR) for row in known]
        # Round 0 has sent nothing, which a logarithmic axis cannot show.
        by_bits.plot([row["bits_sent"] / 1e6 for row in known][1:], errors[1:], linewidth=1.8, label=label, **style)
        by_rounds.plot([row["round"] for row in known], errors, linewidth=1.8, **style)
    _style(by_bits, "sent by all workers together, in Mbit (log scale)", target)
    _style(by_rounds, "rounds", target)
    by_bits.set_xscale("log")
    by_bits.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    by_bits.set_ylabel("squared error, as a part of that at the start")
    figure.suptitle(title, fontsize=10.5, x=0.02, ha="left")
    figure.legend(loc="outside lower left", ncols=2, frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _style(axes, label: str, target: float) -> None:
    axes.set_yscale("log")
    axes.set_ylim(FLOOR, 10)
    axes.axhline(target, color=GREY, linewidth=1, linestyle=":")
    axes.set_xlabel(label)
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=GREY, which="both", length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color("#bbbbbb")
