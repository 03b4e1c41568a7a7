"""Writes a complete report: reads folders of runs, and writes the files of the report's folder.

report.html      one page with everything
table.md         the table of methods, for documents
table.csv        the same with full precision, for other programs
figures/         each figure as .pdf and .svg, for print, and .png
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ...algorithm import able_to
from .captioned_figures import captioned_figures
from .groups import grouped, repeated
from .metrics import main_metric
from .page import Page, as_html
from .runs import Problem, find
from .style import FORMATS, lay_out, save
from .tables import Comparison, as_csv, as_markdown, comparison

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Report(NamedTuple):
    """The content of a report, and its page.

    Args:
        table: the table of methods; None if there are only consensus experiments.
        problems: the problems of runs.
        left_out: a line for each figure that could not be drawn, with the reason.
        page: the HTML page.
    """

    table: Comparison | None
    problems: list[Problem]
    left_out: list[str]
    page: Path


def write_report(
    paths: Sequence[Path],
    out: Path,
    *,
    title: str = "Runs",
    made_by: str = "thinwire",
    metric: str | None = None,
    group: Sequence[str] = (),
    names: Mapping[str, str] | None = None,
) -> Report:
    """Write tables, figures and the page.

    Args:
        paths: folders of runs, folders above them, and .json files of `thinwire consensus`.
        out: the report's folder; files of an earlier report are replaced.
        title: the page's heading.
        made_by: name and version of the program, for the page.
        metric: key of the metric for comparing methods; by default the first test metric.
        group: fields of the configuration that tell methods apart; by default all that differ, except the seed.
        names: maps the text of a value in labels to the text to show instead.

    Raises:
        ValueError: no run, no such metric, field or name, or a folder that cannot be written.
    """
    found = find(paths)
    problems = [*found.problems, *repeated(found.runs)]
    groups = grouped(found.runs, group, names)
    main = main_metric(found.runs, metric)
    table = comparison(groups, main) if groups else None
    figures = captioned_figures(groups, main, found.consensus)
    with able_to(f"write to {str(out)!r}", "choose another --out"):
        out.mkdir(parents=True, exist_ok=True)
        if table is not None:
            _write(out / "table.md", as_markdown(table))
            _write(out / "table.csv", as_csv(table))
        svgs = {figure.name: _save(out / "figures" / figure.name, figure.figure) for figure in figures}
        page = Page(title, made_by, table, figures, svgs, found.runs, problems)
        _write(out / "report.html", as_html(page))
    left_out = [f"{figure.title}: no run has {figure.needs}" for figure in figures if figure.figure is None]
    return Report(table, problems, left_out, out / "report.html")


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", errors="replace")  # a folder's name may be in another encoding


def _save(path: Path, figure: Figure | None) -> str:
    """Write a figure in all formats, or remove the files of an earlier report; returns its SVG, "" without a figure."""
    if figure is not None:
        lay_out(figure)
    for suffix in FORMATS:
        if figure is None:
            path.with_suffix(suffix).unlink(missing_ok=True)
        else:
            save(figure, path.with_suffix(suffix))
    return "" if figure is None else path.with_suffix(".svg").read_text(encoding="utf-8")
