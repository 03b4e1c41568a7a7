"""Writes the rows of a benchmark as a JSON file and as a table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...algorithm import able_to, require
from ..report.style import check_kind


def check_writable(*paths: Path | None, figure: Path | None = None) -> None:
    """Check before a measurement that files can be written, of which None are none.

    Args:
        paths: any files.
        figure: also checked for its kind.

    Raises:
        ValueError: with the reason.
    """
    if figure is not None:
        check_kind(figure)
    for path in filter(None, (*paths, figure)):
        # Opened to append, so that an earlier result stays until there is a new one.
        with able_to(f"write {path}", "choose another file"), open(path, "a"):
            pass


def write_json(path: Path | None, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as one JSON array; None writes nothing."""
    if path is not None:
        path.write_text(json.dumps(list(rows), indent=1) + "\n")


Column = tuple[str, str, str]
"""Its heading, the key of its values, and their format."""


def print_rows(title: str, columns: Sequence[Column], rows: Iterable[Mapping[str, Any]], caption: str) -> None:
    """Print rows as a table; a value that is None makes an empty cell."""
    headings = [heading for heading, _, _ in columns]
    lines = [["" if row[key] is None else format(row[key], style) for _, key, style in columns] for row in rows]
    print_table(title, headings, lines, caption)


def print_table(
    title: str, columns: Sequence[str], lines: Iterable[Sequence[str]], caption: str, num_texts: int = 0
) -> None:
    """Print a table; the first column holds names, the last `num_texts` ones text, and the others numbers."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from ..console import table_console

    console, rows = table_console(), list(lines)
    longest = max((len(row[0]) for row in rows), default=0)
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left", box=SIMPLE_HEAD)
    # Where text can be broken over lines instead, names keep a third of the width.
    table.add_column(columns[0], overflow="fold", min_width=min(longest, console.width // 3) if num_texts else 24)
    for left, column in zip(range(len(columns) - 1, 0, -1), columns[1:], strict=True):
        if left > num_texts:
            table.add_column(column, justify="right", no_wrap=True)
        else:
            table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def as_parsed(text: str, kind: type) -> Any:
    """Parse `text` as an algorithm of this kind.

    Raises:
        ValueError: the text cannot be read, or is not of this kind.
    """
    from ...average import Averager
    from ...average.base import averager_of_part
    from ...notation import parse

    value = parse(text)
    part = averager_of_part(value, text) if kind is Averager else None
    hint = "give one in Python's notation" if part is None else f'it is a {part[0]}; write "{part[1]}"'
    require(isinstance(value, kind), f"{text!r} is no {kind.__name__.lower()}; {hint}")
    return value
