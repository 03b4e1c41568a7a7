"""Help and version answer at once: they do not import PyTorch, which takes seconds."""

from __future__ import annotations

import os
import subprocess
import sys

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
