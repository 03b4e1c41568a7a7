"""`thinwire report`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from .options import parsed, show


@dataclass(frozen=True)
class ReportOptions:
    """Make a table, figures and an HTML page from finished runs, as in: thinwire report runs/ --out report

    RUNS are folders of runs, folders that contain such folders at any depth, and .json files of thinwire consensus. Runs that
    differ only in their seed are one method, shown as mean and standard deviation. Broken and unfinished runs are listed.
    """

    out: Path = Path("report")
    """Folder for report.html, table.md, table.csv and figures/. Replaces an earlier report."""
    metric: str | None = None
    """Metric that compares methods, such as test_loss or mean_model_test_accuracy. None takes the first test metric."""
    group: tuple[str, ...] = ()
    """Fields of the configuration that define a method, such as strategy optimizer.learning_rate. Default: all fields in
    which runs differ, except the seed."""
    names: tuple[str, ...] = ()
    """Names of methods as LABEL=NAME, such as "Gradients(Mean())=dense". LABEL is the label in the table."""
    title: str = "Comparison of runs"
    """Heading of the page."""


def report_command(options: list[str]) -> None:
    """Write a report and print its table."""
    from ... import __version__
    from ..report import as_rich, write_report

    paths = [Path(option) for option in takewhile(lambda option: not option.startswith("-"), options)]
    if not paths and not {"-h", "--help"} & set(options):
        raise ValueError("runs come first, as in: thinwire report runs/ --out report")
    asked = parsed(ReportOptions, options[len(paths) :], "thinwire report RUNS")
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
    label, sign, name = text.rpartition("=")  # strategies can contain equal signs
    if not (sign and label and name):
        raise ValueError(f"names are given as LABEL=NAME, got {text!r}")
    return label, name
