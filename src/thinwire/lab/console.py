"""Where tables are printed."""

from __future__ import annotations

from rich.console import Console


def table_console() -> Console:
    """Standard output, as wide as the terminal, or 120 columns wide if there is none: a file or a pipe has no width."""
    console = Console()
    return console if console.is_terminal else Console(width=120)
