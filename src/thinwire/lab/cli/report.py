"""`thinwire report`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from .options import parsed, show


@dataclass(frozen=True)
class ReportOptions:
    """From finished runs to a table, figures, and one page with all of them, as in: thinwire report runs/ --out report

    RUNS are folders of runs, or folders that hold them somewhere below, and .json files of thinwire consensus. Runs that
    differ in their seed alone are one method: their mean and standard deviation are shown. Broken and unfinished runs are
    named, and the rest is reported on.
    """

    out: Path = Path("report")
    """Folder for report.html, table.md, table.csv and figures/; an earlier report there is replaced."""
    metric: str | None = None
    """What methods are compared by, such as test_loss or mean_model_test_accuracy. None takes the first test metric."""
    group: tuple[str, ...] = ()
    """Fields of the configuration that make a method, such as averager optimizer.learning_rate. None given: all in which
    runs differ, apart from the seed."""
    names: tuple[str, ...] = ()
    """What to call methods, as LABEL=NAME, such as "Mean()=dense"; labels are as in the table."""
    title: str = "Comparison of runs"
    """Heading of the page."""


def report_command(options: list[str]) -> None:
    """Write a report and print its table."""
    from ... import __version__
    from ..report import as_rich, write_report

    paths = [Path(option) for option in takewhile(lambda option: not option.startswith("-"), options)]
    asked = parsed(ReportOptions, options[len(paths) :], "thinwire report RUNS")
    if not paths:
        raise ValueError("runs come first, as in: thinwire report runs/ --out report")
    report = write_report(
        paths,
        asked.out,
        title=asked.title,
        made_by=f"thinwire {__version__}",
        metric=asked.metric,
        group=asked.group,
        names=dict(map(_name, asked.names)),
    )
    if report.table is not None:
        show(as_rich(report.table, asked.title))
    for path, text in report.problems:
        print(f"  {path}: {text}")
    for line in report.left_out:
        print(f"  not drawn: {line}")
    print(f"  {report.page}")


def _name(text: str) -> tuple[str, str]:
    label, sign, name = text.rpartition("=")  # averagers have equal signs of their own
    if not (sign and label and name):
        raise ValueError(f"names are given as LABEL=NAME, got {text!r}")
    return label, name
