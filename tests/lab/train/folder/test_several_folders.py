"""Runs whose machines share no folder: each keeps the parts of its own workers."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.interruptions import NEVER, Requests
from helpers.spawn import spawn

from thinwire.comm import LocalWorld
from thinwire.lab.train import RunConfig
from thinwire.lab.train.folder.run_folder import held_by_first, is_finished_on_all
from thinwire.lab.train.models import DigitsNet
from thinwire.lab.train.results.metrics_files import read_rows
from thinwire.lab.train.run import loop
from thinwire.lab.train.run.interrupt import Interrupted
from thinwire.lab.train.shared_errors import SharedError

CONFIG = RunConfig("digits", "Gossip(Mix(Ring()))", workers=4, batch_size=50, epochs=1, log_every=1, model=DigitsNet(4))
STEPS = 1258 // (4 * 50)
STOP = 3


def held(outputs: list[Path], **options) -> list:
    """What each worker, with one of these output folders, gets from `held_by_first`, and what it finds there."""

    def worker(comm):
        config = replace(CONFIG, output=outputs[comm.rank], **options)
        with ExitStack() as until:
            folder, is_first = held_by_first(config, comm, until)
            comm.barrier()
            names = sorted(path.name for path in folder.iterdir())
            comm.barrier()
            return folder, is_first, names

    return LocalWorld(len(outputs)).run(worker)


@pytest.mark.parametrize(
    ("machines", "first"), [("aaaa", [0]), ("aabb", [0, 2]), ("abab", [0, 1]), ("abcb", [0, 1, 2])]
)
def test_the_first_worker_of_each_output_folder_holds_the_run_there(tmp_path, machines, first):
    found = held([tmp_path / machine for machine in machines], name="mine", suffix=".e1")
    assert [rank for rank, (_, is_first, _) in enumerate(found) if is_first] == first
    assert [folder for folder, _, _ in found] == [tmp_path / machine / "mine.e1" for machine in machines]
    assert all(names == [".lock", "config.json"] for _, _, names in found)
    assert all([*(tmp_path / machine).iterdir()] == [tmp_path / machine / "mine.e1"] for machine in machines)


def test_a_run_is_finished_where_it_is_so_in_all_folders(tmp_path):
    def worker(comm):
        return is_finished_on_all(replace(CONFIG, output=tmp_path / "ab"[comm.rank], name="mine", resume=True), comm)

    for machine in "ab":
        assert LocalWorld(2).run(worker) == [False, False]
        (tmp_path / machine / "mine").mkdir(parents=True)
        (tmp_path / machine / "mine" / "config.json").write_text("{}")
        (tmp_path / machine / "mine" / "summary.json").write_text('{"final": {}}')
    assert LocalWorld(2).run(worker) == [True, True]
    (tmp_path / "b" / "mine" / "config.json").unlink()
    with pytest.raises(SharedError, match="worker 1: '.*/b/mine' is not a run: config.json is missing; restore"):
        LocalWorld(2).run(worker)


def test_worker_0_chooses_the_name_and_another_run_of_this_name_elsewhere_is_an_error_of_all(tmp_path):
    outputs = [tmp_path / "a", tmp_path / "b"]
    default = held(outputs)[0][0].name
    (tmp_path / "a" / f"{default}-2").mkdir()
    assert {folder.name for folder, _, _ in held(outputs)} == {f"{default}-3"}
    (tmp_path / "b" / f"{default}-4").mkdir()
    with pytest.raises(ValueError, match=r"worker 1: '.*/b/.*-4' exists; go on with --resume, replace it"):
        held(outputs)
    assert not (tmp_path / "a" / f"{default}-4").exists(), "the name is free again"


def train_apart(comm, output: Path, machines: str, last: int | None = None, resume: bool = False) -> str:
    """Start the run, or go on with it, up to a step, or to its end; the error of this worker."""
    calls = itertools.count(1)
    stop = NEVER if last is None else Requests(lambda comm: signal.SIGTERM if next(calls) == last else 0)
    config = replace(CONFIG, output=output / machines[comm.rank], name="mine", resume=resume)
    try:
        with ExitStack() as until:
            folder, keeps_folder = held_by_first(config, comm, until)
            loop.run(config, folder, comm, stop, keeps_folder=keeps_folder)
    except (Interrupted, ValueError) as error:
        comm.barrier()
        return str(error)
    return ""


def of_machine(output: Path, machine: str) -> Path:
    return output / machine / "mine" / "checkpoints"


def assert_ended_equally(output: Path, shared: Path) -> None:
    """All workers of machines a, b, a, b have the bits of those of a run on one machine."""
    for rank, machine in enumerate("abab"):
        own, reference = (
            torch.load(checkpoints / f"step-{STEPS:06d}" / f"worker-{rank}.pt", weights_only=True)["model"]
            for checkpoints in (of_machine(output, machine), of_machine(shared, "a"))
        )
        assert own.keys() == reference.keys() and all(torch.equal(own[name], reference[name]) for name in own)


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    """A run of one machine, without a stop."""
    output = tmp_path_factory.mktemp("shared")
    assert spawn(4, train_apart, output, "aaaa") == [""] * 4
    return output


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """A run of two machines that was stopped."""
    output = tmp_path_factory.mktemp("stopped")
    assert all("stopped by SIGTERM, saved" in error for error in spawn(4, train_apart, output, "abab", STOP))
    return output


def test_machines_that_share_no_folder_train_stop_and_go_on_as_those_that_do(tmp_path, shared, stopped):
    output = shutil.copytree(stopped, tmp_path / "copy", symlinks=True)
    assert spawn(4, train_apart, output, "abab", None, True) == [""] * 4
    assert_ended_equally(output, shared)
    for machine, ranks in (("a", (0, 2)), ("b", (1, 3))):
        folder = output / machine / "mine"
        (last,) = folder.glob("checkpoints/step-*")
        assert {path.name for path in last.iterdir()} == {
            *("checkpoint.json", "shared.pt"),
            *(f"worker-{rank}.pt" for rank in ranks),
        }
        assert (folder / "summary.json").is_file() and (folder / "checkpoints" / "best").is_symlink()
        assert [*(folder / "tensorboard").iterdir()]
    means = [
        (checkpoints / "best" / "shared.pt").read_bytes() for checkpoints in map(partial(of_machine, output), "ab")
    ]
    assert means[0] == means[1]
    of_a, of_b = (read_rows(output / machine / "mine" / "metrics.jsonl", STEPS) for machine in "ab")
    assert [row["step"] for row in of_a] == [*range(1, STEPS + 1)]
    assert of_a[0].keys() == of_b[0].keys()
    of_run = [name for name in of_a[0] if "second" not in name]
    assert [[row[name] for name in of_run] for row in of_a] == [[row[name] for name in of_run] for row in of_b]


def test_a_run_goes_on_from_the_newest_checkpoint_that_all_machines_have(tmp_path, shared, stopped):
    """Machine a has a newer one, as where b crashed while it saved."""
    output = shutil.copytree(stopped, tmp_path / "copy", symlinks=True)
    (found,) = of_machine(output, "a").glob("step-*")
    newer = shutil.copytree(found, found.with_name(f"step-{STEPS:06d}"))
    description = json.loads((newer / "checkpoint.json").read_text())
    (newer / "checkpoint.json").write_text(json.dumps(description | {"step": STEPS}))
    assert spawn(4, train_apart, output, "abab", None, True) == [""] * 4
    assert_ended_equally(output, shared)


def test_machines_without_a_checkpoint_in_common_are_an_error_of_all(tmp_path, stopped):
    output = shutil.copytree(stopped, tmp_path / "copy", symlinks=True)
    shutil.rmtree(of_machine(output, "b"))
    (found,) = of_machine(output, "a").glob("step-*")
    for error in spawn(4, train_apart, output, "abab", None, True):
        assert "no checkpoint in common" in error and f"worker 0: {found.name}, worker 1: none" in error


def test_another_number_of_workers_asks_for_the_parts_of_other_machines(tmp_path, stopped):
    output = shutil.copytree(stopped, tmp_path / "copy", symlinks=True)
    for error in spawn(2, train_apart, output, "ab", None, True):
        assert "worker-1.pt is missing" in error and "needs the parts of all in each folder" in error
    for part in of_machine(output, "b").glob("step-*/worker-*.pt"):
        shutil.copy(part, of_machine(output, "a") / part.parent.name)
    assert spawn(2, train_apart, output, "aa", None, True) == [""] * 2
