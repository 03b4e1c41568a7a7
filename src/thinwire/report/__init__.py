"""From the files of finished runs to tables and figures. This room knows those files, and nothing else of ours."""

from .figures import accuracy_against_bytes
from .runs import Run, read_run
from .tables import summary_table

__all__ = ["Run", "accuracy_against_bytes", "read_run", "summary_table"]
