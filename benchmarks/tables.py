"""Tables in Markdown, and the pages in docs/ that show them between two markers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev

DOCS = Path(__file__).parents[1] / "docs"


def table_row(cells: Iterable[object]) -> str:
    """A row of a table.

    Example:
        >>> table_row(["dense", 4])
        '| dense | 4 |'
    """
    return f"| {' | '.join(map(str, cells))} |"


def table_head(names: Sequence[str]) -> list[str]:
    """The lines above a table's rows."""
    return [table_row(names), "|---" * len(names) + "|"]


def spread(values: Iterable[float], form: str = ".2f", form_of_deviation: str | None = None) -> str:
    """Mean and, of several values, sample standard deviation.

    Example:
        >>> spread([1.0, 2.0]), spread([3.0], ".1f")
        ('1.50 ± 0.71', '3.0')
    """
    known = list(values)
    deviation = f" ± {stdev(known):{form_of_deviation or form}}" if len(known) > 1 else ""
    return f"{mean(known):{form}}{deviation}"


def times(dense_bytes: float, sent_bytes: float) -> str:
    """How many times fewer bytes; a single worker sends none.

    Example:
        >>> times(1000, 8), times(1000, 2000), times(0, 0)
        ('125 x', '0.50 x', '-')
    """
    if not sent_bytes:
        return "-"
    ratio = dense_bytes / sent_bytes
    return f"{ratio:.0f} x" if ratio >= 20 else f"{ratio:.1f} x" if ratio >= 1 else f"{ratio:.2f} x"


def publish(page: Path, part: str, lines: Sequence[str]) -> None:
    """Print lines, and put them between a page's two markers of that part."""
    print("\n".join(lines), end="\n\n")
    before, begin, rest = re.split(rf"(<!-- {part}: begin.*?-->\n)", page.read_text(), maxsplit=1)
    end = rest[rest.index(f"<!-- {part}: end -->") :]
    page.write_text("".join([before, begin, *(f"{line}\n" for line in lines), end]))
