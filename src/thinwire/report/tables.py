"""Runs side by side in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from .runs import Run


def summary_table(runs: Sequence[Run], title: str) -> Table:
    """A row per run: accuracy, bytes, and how many times fewer they are than in a dense ring all-reduce."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("method", overflow="fold")
    for column in ("test accuracy", "MB per worker", "vs fp32", "vs bf16", "seconds"):
        table.add_column(column, justify="right")
    for run in runs:
        summary = run.summary
        sent = summary["bytes_sent_per_worker"]
        table.add_row(
            run.label,
            f"{summary['final']['test_accuracy']:.2%}",
            f"{sent / 1e6:,.2f}",
            times(summary["dense_fp32_bytes"], sent),
            times(summary["dense_bf16_bytes"], sent),
            f"{summary['seconds']:.1f}",
        )
    return table


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
