"""Turns the files of runs into tables, figures and a page, and draws predictions and consensus experiments."""

from .accuracy_figure import accuracy_against_bytes
from .runs import Run, read_run
from .tables import as_rich, summary_table
from .write import Report, write_report

__all__ = ["Report", "Run", "accuracy_against_bytes", "as_rich", "read_run", "summary_table", "write_report"]
