"""The progress of a run on a terminal of 80 columns."""

from __future__ import annotations

import io

from rich.console import Console

from thinwire.lab.train.results import terminal
from thinwire.lab.train.results.terminal import Terminal

ROW = {"step": 40, "loss": 0.1234, "accuracy": 0.951, "test_accuracy": 0.9234, "bytes_sent": 1.23e9}


def test_80_columns_cut_nothing(monkeypatch):
    screen = io.StringIO()
    console = Console(file=screen, width=80, height=24, force_terminal=True, color_system=None, highlight=False)
    monkeypatch.setattr(terminal, "Console", lambda **_: console)
    shown = Terminal("digits-mean-topk-0.01-errorfeedback-seed0", 90)
    shown.row(ROW | {"examples_per_second": 12345.0})
    shown.close()
    last = " ".join(screen.getvalue().split())  # lines are broken between words
    for words in (
        "digits-mean-topk-0.01-errorfeedback-seed0",
        "loss 0.123",
        "test accuracy 92.3%",
        "12,345 examples/s",
    ):
        assert words in last, words
    assert "…" not in last


def test_a_row_of_a_worker_that_sends_nothing_has_no_bytes(capsys):
    shown = Terminal("alone", 40)
    shown.row(ROW | {"bytes_sent": 0, "examples_per_second": 12345.0})
    shown.close()
    assert "accuracy 95.1%, test accuracy 92.3%, 12,345 examples/s" in capsys.readouterr().out
