"""The lock on a run's folder: who holds it is named, and it ends with its process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess

import pytest
from helpers.command import python, started, thinwire

from thinwire.lab.files import write_json
from thinwire.lab.train import RunConfig, train
from thinwire.lab.train.folder import checkpoint
from thinwire.lab.train.folder.lock import LOCK, locked
from thinwire.lab.train.folder.run_folder import held_folder

HOLD = """
import sys, time
from pathlib import Path
from thinwire.lab.train.folder.lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(120)
"""


@pytest.fixture
def taken(tmp_path):
    """A run's folder, and the process that holds it."""
    folder = tmp_path / "run"
    folder.mkdir()
    write_json(folder / "config.json", RunConfig("digits").as_dict())
    (folder / "worker-0-error.txt").write_text("of the run that is under way")
    with started(["-c", HOLD, str(folder)], tmp_path) as process:
        process.wait_until(lambda: process.stdout == "held\n", "the lock of the other process")
        yield folder, process


def test_a_run_that_is_under_way_is_neither_resumed_nor_overwritten(taken):
    folder, process = taken
    before = sorted(folder.iterdir())
    for option in ("resume", "overwrite"):
        config = RunConfig("digits", output=folder.parent, name="run", **{option: True})
        with pytest.raises(ValueError) as raised:
            train(config)
        assert f"process {process.pid} on {socket.gethostname()} is training there" in str(raised.value)
        assert "\n" not in str(raised.value)
    assert sorted(folder.iterdir()) == before
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with held_folder(RunConfig("digits", output=folder.parent, name="run", resume=True)) as held:
        assert held == folder and (folder / LOCK).read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"
    assert not (folder / LOCK).exists()


def test_a_new_folder_is_held_too(tmp_path):
    with held_folder(RunConfig("digits", output=tmp_path)) as folder:
        assert (folder / LOCK).exists()
    assert [path.name for path in folder.iterdir()] == ["config.json"]


def test_what_another_process_has_just_made_can_be_overwritten(tmp_path):
    """Else neither has it: the other one, which is late to lock it, finds the lock held."""
    (tmp_path / "run").mkdir()  # by the other one
    late = (
        "from pathlib import Path; from thinwire.lab.train.config import RunConfig; "
        "from thinwire.lab.train.folder import run_folder; run_folder._claim = lambda folder, *_, **__: folder; "
        "run_folder.held_folder(RunConfig('digits', output=Path(), name='run', seed=1)).__enter__()"
    )
    with held_folder(RunConfig("digits", output=tmp_path, name="run", overwrite=True)) as folder:
        before = (folder / "config.json").read_bytes()
        done = python("-c", late, cwd=tmp_path)
        assert done.returncode == 1 and "belongs to a run that is under way" in done.stderr
        assert (folder / "config.json").read_bytes() == before


def test_children_do_not_inherit_the_lock(tmp_path):
    with locked(tmp_path):
        child = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        held = "from pathlib import Path; from thinwire.lab.train.folder.lock import locked; locked(Path()).__enter__()"
        assert python("-c", held, cwd=tmp_path).returncode == 0
    finally:
        child.kill()
        child.wait()


def test_folders_that_are_no_checkpoints_are_ignored(tmp_path):
    ignored = {"step-000013-good", "step-best", ".step-copy", "step-\u0660\u0660\u0660\u0660\u0661\u0662", "step-15"}
    for name in {"step-000003", "step-000007"} | ignored:
        (tmp_path / name).mkdir()
        write_json(tmp_path / name / "checkpoint.json", {"step": 3, "row": {}, "config": {}})
    assert checkpoint.latest(tmp_path) == tmp_path / "step-000007"
    checkpoint.tidy(tmp_path, 7, RunConfig("digits", keep=1), "accuracy", lower_is_better=False)
    assert {path.name for path in tmp_path.iterdir()} == {"step-000007"} | ignored


def test_newer_checkpoints_of_others_do_not_count(tmp_path):
    """They stay, and the run keeps as many of its own as it was told to."""
    for step in (1, 2, 3, 50, 60):
        (tmp_path / checkpoint.name_of(step)).mkdir()
    checkpoint.tidy(tmp_path, 3, RunConfig("digits", keep=2), "accuracy", lower_is_better=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == [checkpoint.name_of(step) for step in (2, 3, 50, 60)]


def test_a_full_disk_is_one_line_that_names_the_file(tmp_path):
    """The metrics go to a device that is always full."""
    folder = tmp_path / "runs" / "full"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl.tmp").symlink_to("/dev/full")
    options = ("--workers", "1", "--max-steps", "4", "--log-every", "2", "--name", "full", "--resume")
    write_json(folder / "config.json", RunConfig("digits").as_dict())
    done = thinwire("train", "digits", *options, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("\n") == 1
    assert "worker 0 failed: ENOSPC: No space left on device: 'runs/full/metrics.jsonl'" in done.stderr


def test_a_checkpoint_that_filled_the_disk_is_removed(tmp_path):
    """Its parts stayed there until a later run saved a newer one, for which they left no space."""
    folder = tmp_path / "runs" / "full"
    (folder / "checkpoints" / ".step-000002").mkdir(parents=True)
    (folder / "checkpoints" / ".step-000002" / "shared.pt").symlink_to("/dev/full")
    options = ("--workers", "1", "--max-steps", "4", "--checkpoint-every", "2", "--name", "full", "--resume")
    write_json(folder / "config.json", RunConfig("digits").as_dict())
    done = thinwire("train", "digits", *options, cwd=tmp_path)
    assert done.returncode == 1 and "No space left on device: '" in done.stderr
    assert list((folder / "checkpoints").iterdir()) == []


def test_a_checkpoint_on_a_full_disk_names_its_file(tmp_path):
    (tmp_path / "worker-0.pt").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device: '.*worker-0.pt'") as raised:
        checkpoint._write(tmp_path / "worker-0.pt", {"weights": [0.0] * 10_000})
    assert raised.value.errno == 28
