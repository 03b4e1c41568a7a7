"""Where the package's messages go, to Python's logger "thinwire"; and what they say of an error.

A program that configures logging gets these records as all others. Until it does, those of level INFO and above go to stderr,
as `thinwire: message`, a line each.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import TextIO

MORE_PROCESSES = "see whether this user's processes and threads reached their limit (ulimit -u), or start fewer workers"
log = logging.getLogger("thinwire")
_shown = warnings.showwarning
_PACKAGE, _PYTHON = Path(__file__).parent, Path(os.__file__).parent
_INSTALLED = {"site-packages", "dist-packages"}


def is_configured() -> bool:
    """Whether the program has configured logging."""
    return bool(logging.getLogger().handlers)


class UntilConfigured(logging.Handler):
    """Writes records to stderr until logging is configured: `logging.lastResort`, but from INFO on."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        # Else handlers of the root logger get the record, because it propagates.
        if not is_configured():
            try:
                sys.stderr.write(f"thinwire: {self.format(record)}\n")
                sys.stderr.flush()
            except Exception:  # there is no stderr, or its terminal was closed; the program goes on
                self.handleError(record)


def install() -> None:
    """Give the logger its handler. A level that the program has set stays."""
    log.addHandler(UntilConfigured())
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)


def error_text(error: BaseException) -> str:
    """What a message says of an error: its class and its text. A ValueError with a text, and the package's own, need no class.

    Example:
        >>> error_text(KeyError("x")), error_text(ValueError("size must be 1 or more, got 0")), error_text(AssertionError())
        ("KeyError: 'x'", 'size must be 1 or more, got 0', 'AssertionError')
    """
    kind, text = type(error), str(error)
    says_all = isinstance(error, (ValueError, FloatingPointError)) or kind.__module__.startswith("thinwire.")
    return text if text and says_all else f"{kind.__name__}: {text}" if text else kind.__name__


def lacks_processes(error: BaseException) -> bool:
    """Whether the system refused to start a process or a thread, as Python or C++ say it.

    Example:
        >>> lacks_processes(RuntimeError("can't start new thread")), lacks_processes(ConnectionRefusedError(111, "refused"))
        (True, False)
    """
    return any(reason in str(error) for reason in ("can't start new thread", os.strerror(errno.EAGAIN)))


def error_place(error: BaseException) -> str:
    """The file and line in the user's code where an error was raised, as ", in loss.py:27"; "" if it has no such line.

    That is the last line outside this package, Python's library and installed packages. Errors that this package raises have
    none: their text says what to do.
    """
    lines = [(Path(frame.f_code.co_filename), number) for frame, number in traceback.walk_tb(error.__traceback__)]
    if not lines or lines[-1][0].is_relative_to(_PACKAGE):
        return ""
    found = next(((path, number) for path, number in reversed(lines) if _is_users(path)), None)
    if found is None:
        return ""
    path, number = found
    with contextlib.suppress(OSError, ValueError):  # the current folder is gone, or elsewhere
        path = path.relative_to(Path.cwd())
    return f", in {path}:{number}"


def _is_users(path: Path) -> bool:
    is_code = not path.name.startswith("<")  # as "<string>" is
    return is_code and not (path.is_relative_to(_PACKAGE) or path.is_relative_to(_PYTHON) or _INSTALLED & {*path.parts})


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
    if filename.startswith(str(_PACKAGE)):
        log.warning("%s", message)
    else:
        _shown(message, category, filename, lineno, file, line)
