"""`thinwire new-method`: the package that it writes passes its own tests, and trains and is compared by name."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from helpers.command import fork_what_is_started
from helpers.program import programs

from thinwire.lab.cli import main
from thinwire.lab.cli.new_method import write_package

NAME = "nearest-levels"


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("methods") / NAME
    write_package(folder)
    return folder


@pytest.fixture(scope="module")
def environment(package) -> dict[str, str]:
    """What an installation leaves: the package on the path, and its entry points in a dist-info folder."""
    info = package.parent / "site" / "nearest_levels-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nearest-levels\nVersion: 0.1.0\n")
    lines = []
    for group, section in re.findall(
        r'^\[project\.entry-points\."([\w.]+)"\]\n((?:.+\n)+)', (package / "pyproject.toml").read_text(), re.MULTILINE
    ):
        lines += [f"[{group}]", *section.replace('"', "").splitlines()]
        lines += [f"Broken = nearest_levels:Missing{group.partition('.')[2]}"]
    (info / "entry_points.txt").write_text("\n".join([*lines, ""]))
    path = os.pathsep.join([str(info.parent), str(package / "src"), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def in_package(do: Callable[[], int], path: list[str], folder: Path) -> None:
    """Call a function in a forked process that finds the package as if it were installed; it returns the exit code."""
    sys.path[:0] = path
    os.chdir(folder)
    fork_what_is_started()
    sys.exit(do())


def done(package: Path, environment: dict[str, str], *calls: Callable[[], int]) -> list[str]:
    """What each of these calls printed, all of them at once, each in a process of its own."""
    path = environment["PYTHONPATH"].split(os.pathsep)
    with programs(in_package, [(call, path, package) for call in calls], package.parent) as running:
        for program in running:
            assert program.wait(300) == 0, program.stdout + program.stderr
        return [program.stdout for program in running]


def own_tests() -> int:
    return pytest.main(["-q", "-p", "no:cacheprovider", "--rootdir", "."])


def test_its_own_tests_pass(package, environment):
    (said,) = done(package, environment, own_tests)
    assert "4 passed" in said


def test_it_is_in_the_style_of_the_library(package):
    for words in (["check", "."], ["format", "--check", "."]):
        subprocess.run([sys.executable, "-m", "ruff", *words], cwd=package, check=True, timeout=600)


def check_names() -> int:
    import thinwire as tw
    from thinwire.lab.recipes import recipes

    ours = tw.parse("Gradients(Mean(NearestLevels(), ErrorFeedback()))")
    assert type(ours.averager.codec).__module__ == "nearest_levels.codec"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger("thinwire"), "warning", (warned := []).append)
        assert recipes()["nearest-levels-text"].config.parsed_strategy() == ours
    assert len(warned) == 1 and "of the package nearest-levels are left out" in warned[0]
    for wrong, message in (("Broken()", "the entry point Broken"), ("NearestLevel()", "did you mean 'NearestLevels'")):
        with pytest.raises(ValueError, match=message):
            tw.parse(wrong)
    return 0


def test_another_process_knows_its_names_and_what_is_wrong_with_an_entry_point(package, environment):
    done(package, environment, check_names)


def test_its_comparison_has_six_methods_on_two_tasks_and_both_tasks_train(package, environment):
    short = ["--max-steps", "2", "--workers", "2", "--name"]
    commands = [
        ["sweep", "compare.toml", "--dry-run"],
        ["train", f"{NAME}-digits", *short, "digits"],
        ["train", f"{NAME}-text", *short, "text"],
    ]
    sweep, *_ = done(package, environment, *(partial(main, words) for words in commands))
    assert "12 runs: 12 waiting" in sweep
    assert sweep.count("nearestlevels") == 2  # two tasks
    for task in ("digits", "text"):
        *_, row = map(json.loads, (package / "runs" / task / "metrics.jsonl").read_text().splitlines())
        assert row["bytes_sent"] < row["dense_fp32_bytes"]


@pytest.mark.parametrize(
    "name, message",
    [
        ("Nearest", "small letters, digits and hyphens"),
        ("lambda", "small letters, digits and hyphens"),
        ("cast", "an algorithm is called Cast already"),
        (".", "small letters, digits and hyphens"),
        ("none", "None is a word of Python"),
        ("thinwire", "there is a module thinwire already"),
        ("json", "there is a module json already"),
    ],
)
def test_a_name_that_serves_no_package_is_refused(name, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        write_package(tmp_path / name)


def test_a_place_that_cannot_have_it_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot write .*file/mine: Not a directory; make it elsewhere"):
        write_package(tmp_path / "file" / "mine")


def test_the_next_command_goes_into_any_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["new-method", "my methods/mine"])
    assert "  cd 'my methods/mine' && pip" in capsys.readouterr().out


def test_a_folder_is_never_overwritten(package):
    with pytest.raises(ValueError, match="exists; choose another name"):
        write_package(package)
