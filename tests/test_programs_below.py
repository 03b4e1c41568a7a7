"""The helper that lists the processes below another one looks at threads and processes that may end meanwhile."""

import os
import subprocess
from pathlib import Path

import pytest
from helpers.program import below, workers_of


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the kernel's table of processes is Linux's")
def test_what_ends_meanwhile_is_left_out(monkeypatch):
    iterdir, read_text = Path.iterdir, Path.read_text

    def with_an_ended_thread(path):
        return [path / "0", *iterdir(path)]

    def with_an_ended_process(path):
        return read_text(path) + (" 0" if path.name == "children" else "")

    monkeypatch.setattr(Path, "iterdir", with_an_ended_thread)
    monkeypatch.setattr(Path, "read_text", with_an_ended_process)
    with subprocess.Popen(["sleep", "600"]) as child:
        try:
            assert {child.pid, 0} <= set(below(os.getpid()))
            assert not {child.pid, 0} & set(workers_of(os.getpid()))
        finally:
            child.kill()
