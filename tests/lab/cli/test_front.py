"""Help and version answer at once: they do not import PyTorch, which takes seconds."""

from __future__ import annotations

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
