"""Commands without the packages of the extra: one line that names it, in a process that cannot import them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from helpers.command import python

from thinwire.lab.cli.extras import EXTRAS

WITHOUT = """
import sys

class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {packages!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Without())
from thinwire.lab.cli import main

for command in {commands!r}:
    print(main(command.split()), flush=True)
"""
COMMANDS = [
    *("train digits", "train --list", "demo", "sweep grid.toml", "report runs", "consensus", "topology Ring()"),
    *("bench codecs", "bench step"),
]


def test_every_command_names_the_extra_on_one_line(tmp_path):
    program = WITHOUT.format(packages=set(EXTRAS), commands=[*COMMANDS, "--help", "--version"])
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    lines = done.stderr.splitlines()
    assert len(lines) == len(COMMANDS), done.stderr
    for command, line in zip(COMMANDS, lines, strict=True):
        assert line.startswith(f"thinwire: thinwire {command.split()[0]} needs "), line
        assert line.endswith("with this, in the folder of thinwire's sources: pip install '.[train]'"), line
    assert [line for line in done.stdout.splitlines() if line.isdecimal()] == ["2"] * len(COMMANDS) + ["0"] * 2


@pytest.mark.parametrize("package", ["tensorboard", "sacrebleu"])
def test_a_package_that_only_workers_need_is_missed_before_they_start(package, monkeypatch, capsys):
    import importlib.util as util

    from thinwire.lab.cli import extras, main

    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == package else util.find_spec(name))
    assert main(["train", "digits"]) == 2
    assert capsys.readouterr().err == (
        f"thinwire: thinwire train needs {package}, which is not installed; install it with this, in the folder of "
        "thinwire's sources: pip install '.[train]'\n"
    )


def test_keys_name_an_extra_of_their_own(tmp_path):
    done = python("-c", WITHOUT.format(packages={"cryptography"}, commands=["keys new folder"]), cwd=tmp_path)
    assert done.stdout.split() == ["2"] and done.stderr.count("\n") == 1 and "pip install '.[secure]'" in done.stderr
