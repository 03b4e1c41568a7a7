"""From the files of runs to tables, figures and a page. This room knows those files, and nothing else of ours."""

from .accuracy_figure import accuracy_against_bytes
from .runs import Run, read_run
from .tables import as_rich, summary_table
from .write import Report, write_report

__all__ = ["Report", "Run", "accuracy_against_bytes", "as_rich", "read_run", "summary_table", "write_report"]
