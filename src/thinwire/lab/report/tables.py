"""Tables of runs: for the terminal, in Markdown, and as CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Sequence
from functools import partial
from statistics import mean, stdev
from textwrap import fill
from typing import TYPE_CHECKING, Any, NamedTuple

from .groups import SIZES, Group, differing
from .metrics import Metric, main_metric, metric, number, on_test_sets
from .runs import Run

if TYPE_CHECKING:
    from rich.table import Table


SECONDS = ("seconds", "virtual_seconds")
BYTES = ("bytes_sent_per_worker", "compression_vs_fp32", "compression_vs_bf16")


class Column(NamedTuple):
    """A metric, and the function that reads it from a run: None if it is missing, NaN if the run diverged."""

    metric: Metric
    read: Callable[[Run], float | None]


class Cell(NamedTuple):
    """Mean and standard deviation over seeds, in the column's unit, and their text."""

    mean: float | None
    std: float | None
    text: str
    is_best: bool = False


class Line(NamedTuple):
    """The line of a method: its label, its number of seeds, and a cell for each column."""

    label: str
    num_runs: int
    cells: list[Cell]


class Comparison(NamedTuple):
    """A table of methods, best first."""

    columns: list[Metric]
    lines: list[Line]


def comparison(groups: Sequence[Group], main: Metric | None) -> Comparison:
    """Compare the finished runs of each group; columns that no run has are left out.

    The best value of a column is marked, unless runs differ in workers, epochs or steps: a longer run is no better method.

    Args:
        groups: those without a finished run get empty cells.
        main: the metric by which lines are sorted.
    """
    runs = [run for group in groups for run in group.runs if run.finished]
    columns = [column for column in _columns(runs, main) if any(column.read(run) is not None for run in runs)]
    lines = [_line(group, columns) for group in groups]
    # A longer run is no better method.
    if not SIZES & set(differing(runs)):
        for place, column in enumerate(columns):
            _mark_best(lines, place, column.metric)
    if main is not None and main.higher_is_better is not None and main in (column.metric for column in columns):
        lines.sort(key=lambda line: _rank(line.cells[0].mean, main))  # its column is the first
    return Comparison([column.metric for column in columns], lines)


def _columns(runs: Sequence[Run], main: Metric | None) -> list[Column]:
    first = [main] if main else []
    others = [m for m in [*on_test_sets(runs), metric("consensus_distance")] if m not in first]
    return [
        *map(_of_metric, first),
        Column(Metric("bytes_sent_per_worker", "MB per worker", "", 1e-6, False), _sent),
        Column(Metric("compression_vs_fp32", "vs fp32", "×", 1, True), lambda run: _fewer(run, "dense_fp32_bytes")),
        Column(Metric("compression_vs_bf16", "vs bf16", "×", 1, True), lambda run: _fewer(run, "dense_bf16_bytes")),
        *(Column(Metric(key, key.replace("_", " "), "", 1, False), partial(_of_summary, key)) for key in SECONDS),
        *map(_of_metric, others),
    ]


def _of_summary(key: str, run: Run) -> float | None:
    return _number(run.summary, key)


def _of_metric(shown: Metric) -> Column:
    return Column(shown, lambda run: _final(run, shown.key))


def _final(run: Run, key: str) -> float | None:
    """The number in the summary, or else in the last row that has it."""
    # Not every metric of the rows is in the summary.
    rows = [run.summary.get("final") or {}, *reversed(run.rows)]
    return next((_number(row, key) for row in rows if key in row), None)


def _number(row: dict[str, Any], key: str) -> float | None:
    return number(row, key) if key in row else None


def _sent(run: Run) -> float | None:
    return _number(run.summary, "bytes_sent_per_worker") or None  # a single worker sends none


def _fewer(run: Run, key: str) -> float | None:
    sent, dense = _sent(run), _number(run.summary, key)
    return dense / sent if sent and dense else None


def _line(group: Group, columns: Sequence[Column]) -> Line:
    finished = [run for run in group.runs if run.finished]
    cells = [_cell([column.read(run) for run in finished], column.metric) for column in columns]
    return Line(group.label, len(finished), cells)


def _cell(values: Sequence[float | None], shown: Metric) -> Cell:
    """Mean and sample standard deviation of the existing numbers; no mean if a run diverged."""
    known = [shown.scale * value for value in values if value is not None]
    diverged = sum(not math.isfinite(value) for value in known)
    if diverged or not known:
        return Cell(None, None, f"diverged in {diverged} of {len(known)}" if diverged else "–")
    center, spread = mean(known), stdev(known) if len(known) > 1 else None
    text = _text(center, shown.unit)
    if spread is None or (shown.key in BYTES and spread < 1e-3 * center):
        return Cell(center, spread, text)  # bytes that seeds hardly change
    return Cell(center, spread, f"{text} ± {_text(spread, shown.unit, center)}")


def _text(value: float, unit: str, like: float | None = None) -> str:
    """Format a number: two decimals for per cent, else three significant digits; `like` sets the decimals of a deviation."""
    if unit == "%":
        return f"{value:.2f}"
    size = abs(value if like is None else like)
    if size and not 1e-3 <= size < 1e6:
        return f"{value:.2e}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(size))) if size else 0}f}"


def _mark_best(lines: list[Line], place: int, shown: Metric) -> None:
    best = shown.best([mean for line in lines if (mean := line.cells[place].mean) is not None])
    for line in lines:
        cell = line.cells[place]
        line.cells[place] = cell._replace(is_best=len(lines) > 1 and best is not None and cell.mean == best)


def _rank(value: float | None, main: Metric) -> tuple[bool, float]:
    """Sorts the best first, and methods without a value last."""
    return (value is None, 0.0 if value is None else -value if main.higher_is_better else value)


def heads(table: Comparison) -> list[str]:
    """The headings of all columns; arrows show the better direction."""
    return ["method", "runs", *(m.label + m.arrow for m in table.columns)]


def as_rich(table: Comparison, title: str) -> Table:
    """A table for the terminal: the first metric, bytes and seconds; the files have all columns."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    shown = Table(title=escape(title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    places = [i for i, m in enumerate(table.columns) if i == 0 or m.key in (*BYTES, *SECONDS)]
    shown.add_column("method", overflow="fold")
    for head in [heads(table)[1], *(heads(table)[2 + i] for i in places)]:
        # Several short lines, which leave room for the method on a terminal of 80 columns.
        shown.add_column(fill(head, 9, break_long_words=False), justify="right", no_wrap=True)
    for line in table.lines:
        cells = [line.cells[i] for i in places]
        texts = (f"[bold]{c.text}[/]" if c.is_best else c.text for c in cells)
        shown.add_row(escape(line.label), str(line.num_runs), *texts)
    return shown


def as_markdown(table: Comparison) -> str:
    """A table in GitHub's Markdown; the best value of a column is bold."""
    lines = ["| " + " | ".join(heads(table)) + " |", "|---|" + "--:|" * (1 + len(table.columns))]
    for line in table.lines:
        cells = [f"**{cell.text}**" if cell.is_best else cell.text for cell in line.cells]
        label = line.label.replace("|", "\\|")
        lines.append(f"| `{label}` | {line.num_runs} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def as_csv(table: Comparison) -> str:
    """CSV in full precision, in the units of the table: for each metric a column of means and one of deviations."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [f"{m.key}_percent" if m.unit == "%" else m.key for m in table.columns]
    names = ["megabytes_sent_per_worker" if name == "bytes_sent_per_worker" else name for name in names]
    writer.writerow(["method", "runs", *(f"{name}_{part}" for name in names for part in ("mean", "std"))])
    for line in table.lines:
        numbers = [value for cell in line.cells for value in (cell.mean, cell.std)]  # csv writes None as ""
        writer.writerow([line.label, line.num_runs, *numbers])
    return text.getvalue()


def summary_table(runs: Sequence[Run], title: str) -> Table:
    """The same for a few runs, with a line for each."""
    groups = [Group({}, [run], run.label) for run in runs]
    return as_rich(comparison(groups, main_metric(runs, None)), title)
