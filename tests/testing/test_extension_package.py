"""A package outside the tree: its algorithms pass the suites and train by name from the command line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.command import fork_what_is_started
from helpers.program import programs

PACKAGE = Path(__file__).parents[1] / "extension_package"


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """What an installation leaves: the package on the path, and its entry points in a dist-info folder."""
    site = tmp_path_factory.mktemp("site")
    info = site / "thinwire_example-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thinwire-example\nVersion: 1.0\n")
    project = (PACKAGE / "pyproject.toml").read_text()
    section = project.split('[project.entry-points."thinwire.algorithms"]\n')[1]
    entries = re.findall(r'^(\w+) = "([\w.:]+)"$', section, re.MULTILINE)
    lines = [f"{name} = {target}" for name, target in entries] + ["Broken = thinwire_example:Missing"]
    (info / "entry_points.txt").write_text("\n".join(["[thinwire.algorithms]", *lines, ""]))
    path = os.pathsep.join([str(site), str(PACKAGE / "src"), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def run(environment, *command: str, folder: Path | None = None) -> subprocess.CompletedProcess:
    command = (sys.executable, *command)
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def test_its_algorithms_pass_the_suites_by_name(environment):
    code = """
import thinwire as tw
from thinwire.testing import check_averager, check_codec, check_memory
import sys
codec, memory, averager = tw.parse("Halves()"), tw.parse("FadingMemory(fraction=0.25)"), tw.parse("LazyMix(Ring())")
assert codec.__class__.__module__ == "thinwire_example"
check_codec(codec)
check_memory(memory)
check_averager(averager)
check_averager(tw.parse("Mean(chain(TopK(0.1), Halves()), FadingMemory())"), sizes=(2,))
for wrong, message in (("Broken()", "the entry point Broken"), ("Halfs()", "did you mean 'Halves'")):
    try:
        tw.parse(wrong)
    except ValueError as error:
        assert message in str(error), error
    else:
        raise AssertionError(wrong)
"""
    done = run(environment, "-c", code)
    assert done.returncode == 0, done.stderr


OPTIONS = ["train", "digits", "--epochs", "1", "--workers", "2", "--name", "example", "--strategy"]


def trained_averager(folder: Path) -> str:
    (config,) = folder.rglob("config.json")
    return json.dumps(json.loads(config.read_text()))


def test_it_trains_by_name_from_the_command_line(environment, tmp_path):
    done = run(
        environment,
        "-m",
        "thinwire",
        *OPTIONS,
        "Gradients(Mean(Halves(), FadingMemory(fraction=0.9)))",
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "Mean" in trained_averager(tmp_path) and "Halves" in trained_averager(tmp_path)


def main_with_path(path: list[str], folder: str, words: list[str]) -> None:
    sys.path[:0] = path
    os.chdir(folder)
    from thinwire.lab import cli

    fork_what_is_started()
    sys.exit(cli.main(words))


def test_its_gossip_averager_trains_by_name(environment, tmp_path):
    """As the command line does, in processes that are forked."""
    arguments = (environment["PYTHONPATH"].split(os.pathsep), str(tmp_path), [*OPTIONS, "Gossip(LazyMix(Ring()))"])
    with programs(main_with_path, [arguments], tmp_path) as (command,):
        assert command.wait(300) == 0, command.stderr
    assert "LazyMix" in trained_averager(tmp_path)
