"""Where the package's messages go: to Python's logger "thinwire".

A program that configures logging gets these records as all others. Until it does, those of level INFO and above go to stderr,
as `thinwire: message`, a line each.
"""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from typing import TextIO

log = logging.getLogger("thinwire")
_shown = warnings.showwarning


def is_configured() -> bool:
    """Whether the program has configured logging."""
    return bool(logging.getLogger().handlers)


class UntilConfigured(logging.Handler):
    """Writes records to stderr until logging is configured: `logging.lastResort`, but from INFO on."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        # Else handlers of the root logger get the record, because it propagates.
        if not is_configured():
            sys.stderr.write(f"thinwire: {self.format(record)}\n")
            sys.stderr.flush()


def install() -> None:
    """Give the logger its handler. A level that the program has set stays."""
    log.addHandler(UntilConfigured())
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)


def install_for_warnings() -> None:
    """Send warnings of the package's code to the logger too: on a command line, the line of code that warns says nothing."""
    warnings.showwarning = _show


def _show(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    if filename.startswith(str(Path(__file__).parent)):
        log.warning("%s", message)
    else:
        _shown(message, category, filename, lineno, file, line)
