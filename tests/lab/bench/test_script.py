"""How the scripts in benchmarks/ end after a mistake in their command: as `thinwire` does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from helpers.command import python

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.mark.parametrize(
    ("script", "options", "expected"),
    [
        ("sharded_netlab", "--rate fast", "'fast' is not a line: give one of lan,"),
        ("plan_netlab", "--rates 1gbit fast", "rate 'fast' is not a rate: give a number"),
        ("joining", "--line nowhere", "'nowhere' is not a line: give one of lan,"),
        ("adam", "run nowhere", "nowhere/valid.txt is not there"),
        ("adam", "table --results .", ".: Is a directory"),
        ("cifar", "nowhere --docs nowhere", "there is no folder nowhere"),
        ("code_lines", "file", "file is not a folder"),
        ("path", "TopK(0.1)", "'TopK(0.1)' is no averager"),
        ("robust", "Identity() Mean()", "'Mean()' is no codec"),
        ("goodput", "--synchronous foo", "unknown name 'foo'"),
        ("internet", "file --table", "file is not a folder"),
        ("internet", "runs --table --docs .", "no run of this size is finished, so internet.md stays as it is"),
    ],
)
def test_a_mistake_gets_one_line_and_exit_code_2(script, options, expected, tmp_path):
    (tmp_path / "file").touch()
    done = python(BENCHMARKS / f"{script}.py", *options.split(), cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(f"{script}: ") and expected in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_bug_shows_where_it_is(monkeypatch, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", ["study.py"])
    from script import run_script

    def bug() -> None:
        raise ConnectionResetError("by the network")

    with pytest.raises(ConnectionResetError):
        run_script(bug)
    with pytest.raises(SystemExit, match="^3$"):
        run_script(lambda: 3)
