"""A stdout or stderr that fails: work goes on, a command says one line, and characters that a locale lacks are no error."""

from __future__ import annotations

import io
import logging
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from thinwire.lab.cli import main
from thinwire.lab.console import table_console
from thinwire.lab.output import WhileOpen
from thinwire.lab.sweep import show
from thinwire.lab.sweep.status import Status
from thinwire.lab.train.results.terminal import Terminal

ROW = {"step": 40, "loss": 0.5, "accuracy": 0.9, "bytes_sent": 0.0, "examples_per_second": 9.0}


def closed_terminal():
    """A terminal whose window was closed."""
    master, terminal = pty.openpty()
    os.close(master)
    return open(terminal, "w")


def closed_pipe():
    reading, writing = os.pipe()
    os.close(reading)
    return open(writing, "w")


def full_disk():
    return open("/dev/full", "w")


FAILING = [closed_terminal, closed_pipe, full_disk]


@pytest.mark.parametrize("opened", FAILING)
def test_a_run_outlives_its_stdout(opened, monkeypatch, caplog):
    """Its first row ended it, with "OSError: [Errno 5] Input/output error", or without a reason where a pipe had no reader."""
    with opened() as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        shown = Terminal("digits", 80)
        shown.row(ROW)
        shown.row(ROW | {"step": 80})
        shown.close()
        print("of a callback", flush=True)
    assert caplog.text.count("what follows is not shown: stdout fails (") == 1


@pytest.mark.parametrize("opened", FAILING)
def test_a_sweep_outlives_its_stdout(opened, monkeypatch):
    """It stopped all runs that were under way."""
    monkeypatch.setattr(show, "status_of", lambda run: Status("finished"))
    with opened() as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        show.print_ended([type("Run", (), {"folder": Path("a")})])


def test_a_table_without_a_reader_leaves_the_exit_code_to_the_command(monkeypatch):
    """It was 1, as of a worker that failed, and not 141."""
    with pytest.raises(BrokenPipeError), closed_pipe() as stdout:  # closing it fails too
        monkeypatch.setattr(sys, "stdout", stdout)
        table_console().print("seconds")
        pytest.fail("it was printed")


@pytest.mark.parametrize("is_terminal", [False, True])
def test_square_brackets_in_the_name_of_a_run_are_shown(is_terminal, monkeypatch):
    """They were taken for the markup of a colour: "mean[v2]" was "mean"."""
    written = io.StringIO()
    written.isatty = lambda: is_terminal
    monkeypatch.setattr(sys, "stdout", written)
    monkeypatch.setenv("TERM", "xterm")
    shown = Terminal("mean[v2]", 40)
    shown.row(ROW)
    shown.close()
    assert "mean[v2]" in written.getvalue()


def test_output_in_a_locale_without_a_character_has_a_question_mark(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    shown = Terminal("größe", 40)
    shown.row(ROW)
    shown.close()
    assert written.getvalue().startswith(b"gr??e: step 40/40, loss 0.500")


def test_a_process_without_stdout_shows_nothing(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    stream = WhileOpen()
    assert (stream.encoding, stream.isatty(), stream.write("text")) == ("utf-8", False, 4)
    stream.flush()


@pytest.mark.parametrize(
    ("redirected", "code", "said"),
    [
        (">&-", 0, ""),
        ("<&- >&- 2>&-", 0, ""),
        (">/dev/full", 1, "thinwire: cannot write the output: No space left on device; free some space\n"),
    ],
)
def test_a_command_whose_stdout_is_closed_or_full_has_no_traceback(redirected, code, said):
    command = f'"{sys.executable}" -m thinwire --version {redirected}'
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (code, said)


def test_a_table_in_a_locale_without_arrows_is_no_error(monkeypatch):
    """A run that had finished ended with exit code 2."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    monkeypatch.setattr("thinwire.lab.cli.COMMANDS", {"shows": lambda options: print("seconds ↓")})
    assert main(["shows"]) == 0
    assert written.getvalue() == b"seconds ?\n"


@pytest.mark.parametrize("opened", [closed_terminal, lambda: None])
def test_a_warning_without_a_stderr_ends_no_program(opened, monkeypatch):
    """In a process without a stderr it was an AttributeError of the line that warned."""
    stderr = opened()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr("thinwire.messages.is_configured", lambda: False)
    logging.getLogger("thinwire").warning("a worker is slow")
    if stderr is not None:
        with pytest.raises(OSError):  # as it has failed
            stderr.close()
