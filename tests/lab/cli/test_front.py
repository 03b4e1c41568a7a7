"""Help and version answer at once: they do not import PyTorch, which takes seconds."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HELP_WITHOUT_TORCH = [
    *("--help", "-h", "--version", "train", "train --help", "bench --help"),
    *("demo --help", "sweep --help", "report --help", "topology --help", "demo --nonsense"),
]


@pytest.mark.parametrize("command", HELP_WITHOUT_TORCH)
def test_help_does_not_import_torch(command):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "thinwire", *command.split()],
        capture_output=True,
        text=True,
        timeout=600,
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert done.returncode == (2 if command.endswith("nonsense") else 0), done.stderr[-500:]
    assert "thinwire.lab.cli" in imported
    assert "torch" not in imported


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_nobody_reads_ends_a_command_quietly(unbuffered):
    """As in `thinwire train --list | head -1`. The reader is gone before the command begins."""
    for command in ("--help", "demo --help"):
        reading, writing = os.pipe()
        os.close(reading)
        with os.fdopen(writing, "wb") as stdout:
            done = subprocess.run(
                [sys.executable, "-m", "thinwire", *command.split()],
                stdout=stdout,
                stderr=subprocess.PIPE,
                text=True,
                timeout=600,
                env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            )
        assert (done.returncode, done.stderr) == (141, ""), command


def test_make_demo_says_how_long_it_installed_and_the_remedy_without_a_compiler(tmp_path):
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / "src/thinwire").mkdir(parents=True)
    shutil.copy(Path(__file__).parents[3] / "Makefile", tmp_path)
    for name in ("pyproject.toml", "constraints.txt", "CMakeLists.txt"):
        (tmp_path / name).touch()
    for name in ("python", "thinwire"):
        program = tmp_path / ".venv/bin" / name
        program.write_text('#!/bin/sh\necho "$@"\n')
        program.chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "CXX": "no-such-compiler"}
    done = subprocess.run(["make", "demo"], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "install one (Debian: apt install g++;" in done.stderr
    *_, installed, shown, printed = done.stdout.splitlines()
    assert (
        re.fullmatch(r"installed in \d+ seconds", installed) and shown.endswith("thinwire demo") and printed == "demo"
    )


def test_help_without_docstrings_says_why():
    """It printed "None"."""
    done = subprocess.run(
        [sys.executable, "-OO", "-m", "thinwire", "train", "--help"], capture_output=True, text=True, timeout=600
    )
    assert (done.returncode, done.stdout) == (0, "no help: Python runs without docstrings (-OO, or PYTHONOPTIMIZE=2)\n")
