"""Where tables are printed."""

from __future__ import annotations

from rich.console import Console


class TableConsole(Console):
    """Rich's console, which leaves it to the caller what a broken pipe means; its own ends the process with exit code 1."""

    def on_broken_pipe(self) -> None:
        """Raise the error that it is called for."""
        raise


def table_console() -> Console:
    """Standard output, as wide as the terminal, or 120 columns wide if there is none: a file or a pipe has no width."""
    console = TableConsole()
    return console if console.is_terminal else TableConsole(width=120)
