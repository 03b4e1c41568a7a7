"""What a run leaves to go on from, and what is said where that does not fit: whole commands and real processes."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command import started, thinwire
from helpers.held_run import held_at
from helpers.program import below, wait_until

from thinwire import LocalWorld
from thinwire.lab.train import RunConfig, train
from thinwire.lab.train.folder import checkpoint
from thinwire.lab.train.folder.checkpoint import latest, load_latest
from thinwire.lab.train.folder.run_folder import FREE, check_same, make_folder
from thinwire.lab.train.models import DigitsNet
from thinwire.lab.train.results.meter import Meter
from thinwire.lab.train.results.metrics_files import MetricsWriter, read_rows
from thinwire.lab.train.step.training import Training

CONFIG = RunConfig(
    *("digits", "Gradients(Mean(TopK(0.1), ErrorFeedback()))"),
    **{"workers": 2, "batch_size": 200, "epochs": 3, "log_every": 1, "checkpoint_every": 2, "keep": 2, "name": "run"},
    model=DigitsNet(width=4),
)  # three steps an epoch


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    return train(replace(CONFIG, output=tmp_path_factory.mktemp("finished")))


@pytest.fixture
def begun(finished, tmp_path) -> tuple[RunConfig, Path]:
    """A run that was killed after its eighth step, in the middle of a row and of its next checkpoint."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder, symlinks=True)
    (folder / "summary.json").unlink()
    (folder / "checkpoints" / "step-000009").rename(folder / "checkpoints" / ".step-000009")
    (folder / "checkpoints" / ".step-000009" / "shared.pt").unlink()
    (folder / "checkpoints" / "best").unlink()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 10, "lo')
    return replace(CONFIG, output=tmp_path, resume=True), folder


def without_times(folder: Path) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    changing = ("second", "other_bytes_sent")  # a stop sends bytes too
    return [{key: value for key, value in row.items() if not any(word in key for word in changing)} for row in rows]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and "error" not in path.name}


def test_the_last_checkpoints_and_the_best_are_kept(finished):
    rows = without_times(finished)
    tested = {row["step"]: row["test_accuracy"] for row in rows if "test_accuracy" in row}
    assert list(tested) == [3, 6, 9]
    best = max(tested, key=lambda step: (tested[step], -step))
    assert os.readlink(finished / "checkpoints" / "best") == f"step-{best:06d}"
    kept = sorted(path.name for path in (finished / "checkpoints").glob("step-*"))
    assert kept == sorted({f"step-{step:06d}" for step in (best, 8, 9)})
    files = [*(finished / "checkpoints").rglob("*.pt")]
    assert len(files) >= 3 * len(kept)
    for file in files:
        torch.load(file, weights_only=True)
    described = json.loads((finished / "checkpoints" / "step-000009" / "checkpoint.json").read_text())
    assert described["step"] == 9 and described["row"]["test_accuracy"] == tested[9] and described["config"]["strategy"]


def test_a_copied_run_may_have_a_folder_in_place_of_the_link_to_the_best(finished, tmp_path):
    """`scp -r` copies what a link leads to."""
    checkpoints = Path(shutil.copytree(finished / "checkpoints", tmp_path / "checkpoints", symlinks=False))
    assert not (checkpoints / "best").is_symlink()
    checkpoint.tidy(checkpoints, 9, CONFIG, "accuracy", lower_is_better=False)
    assert os.readlink(checkpoints / "best") == os.readlink(finished / "checkpoints" / "best")
    assert {path.name for path in checkpoints.iterdir()} == {path.name for path in (finished / "checkpoints").iterdir()}


def test_a_killed_run_goes_on_from_its_checkpoint_as_if_nothing_had_been(begun, finished):
    config, folder = begun
    assert train(config) == folder
    assert without_times(folder) == without_times(finished)
    columns = [
        [line.count(",") for line in (each / "metrics.csv").read_text().splitlines()] for each in (folder, finished)
    ]
    assert columns[0] == columns[1] and len(columns[0]) == 10
    models = [
        torch.load(each / "checkpoints" / "step-000009" / "shared.pt", weights_only=True) for each in (folder, finished)
    ]
    assert all(torch.equal(value, models[1]["model"][name]) for name, value in models[0]["model"].items())
    summaries = [json.loads((each / "summary.json").read_text()) for each in (folder, finished)]
    assert {**summaries[0], "seconds": 0} == {**summaries[1], "seconds": 0}
    assert (folder / "checkpoints" / "best").resolve() == folder / "checkpoints" / (
        os.readlink(finished / "checkpoints" / "best")
    )
    assert not list((folder / "checkpoints").glob(".step-*"))


def test_a_run_goes_on_with_another_number_of_workers(begun, finished):
    config, folder = (
        begun  # two workers, 800 of 1297 examples into the third epoch: one worker has two more steps of 200
    )
    assert train(replace(config, workers=1)) == folder
    rows = without_times(folder)
    assert rows[:8] == without_times(finished)[:8]
    assert [(row["step"], row["epoch"]) for row in rows[8:]] == [(9, 2 + 5 / 6), (10, 3.0)]
    assert "test_accuracy" in rows[9] and json.loads((folder / "summary.json").read_text())["workers"] == 1
    described = json.loads((folder / "checkpoints" / "step-000010" / "checkpoint.json").read_text())
    assert described["workers"] == [0] and described["origin"] == [8, 2, 800]


def test_a_finished_run_is_not_run_again(finished):
    before = contents(finished)
    assert train(replace(CONFIG, output=finished.parent, resume=True, threads=2)) == finished
    assert contents(finished) == before


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"model": DigitsNet(width=8)}, "model.width 4, not 8"),
        ({"strategy": "Gradients(Mean())"}, r"strategy 'Gradients\(Mean\(TopK\(.*\)\)', not 'Gradients\(Mean\(\)\)'"),
        ({"epochs": 9}, "epochs 3, not 9"),
        ({"max_steps": 20}, "max_steps None, not 20"),
        ({"seed": 1, "split": "by-class"}, "seed 0, not 1; split 'even', not 'by-class'"),
    ],
)
def test_a_run_goes_on_only_as_it_began(changes, expected, begun):
    config, folder = begun
    before = contents(folder)
    with pytest.raises(ValueError, match=expected):
        train(replace(config, **changes))
    assert contents(folder) == before


def test_what_does_not_change_the_result_may_change():
    assert {name.split(".")[0] for name in FREE} > {"output", "keep", "log_every", "threads", "device"}
    free = {"log_every": 7, "keep": 3, "checkpoint_every": None, "threads": 2, "device": "cpu", "evaluate_every": 2}
    free |= {"elastic": True, "check_every": 0}  # after states have diverged
    check_same(replace(CONFIG, **free), json.loads(json.dumps(CONFIG.as_dict())), Path("run"))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def edit(key: str, value: Any) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))

    return damage


def replaced(state: Any) -> Callable[[Path], None]:
    return partial(torch.save, state)


WHOLE_RUNS = [
    *[("shared.pt", cut, "not a zip file"), ("worker-1.pt", flip, ""), ("worker-0.pt", Path.unlink, "No such file")],
    ("shared.pt", replaced(torch.ones(3)), "expected a dictionary, got Tensor"),
    ("checkpoint.json", lambda path: path.write_text("{"), "Expecting property name"),
    ("checkpoint.json", edit("step", "x"), "its step is 'x', expected 8"),
    ("checkpoint.json", edit("workers", 0), "its workers are 0, expected their numbers"),
    ("checkpoint.json", edit("origin", 5), "origin|iterable"),
    ("checkpoint.json", edit("rounds", -1), "its rounds are -1, expected a number"),
    ("checkpoint.json", edit("row", {"step": 8, "loss": "low"}), "loss should be a number"),
]


@pytest.mark.parametrize("name, damage, reason", WHOLE_RUNS[:2])
def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(name, damage, reason, begun, finished, capsys):
    """It ended there, and the folder had to be removed by hand."""
    config, folder = begun
    checkpoints = folder / "checkpoints"
    damage(checkpoints / "step-000008" / name)
    before = [path.name for path in checkpoints.glob("step-*") if path.name < "step-000008"]
    alone(config, folder)
    said = capsys.readouterr().err
    assert re.search(
        rf"step-000008/{name} is missing, truncated or damaged \(.*{reason}.*goes on from {max(before)}", said
    )
    assert said.count("\n") == 1
    assert (checkpoints / "damaged-step-000008").is_dir()
    assert train(config) == folder
    assert without_times(folder) == without_times(finished)
    models = [torch.load(each / "checkpoints/step-000009/shared.pt", weights_only=True) for each in (folder, finished)]
    assert all(torch.equal(value, models[1]["model"][key]) for key, value in models[0]["model"].items())


@pytest.mark.parametrize("name, damage, reason", WHOLE_RUNS)
def test_every_kind_of_damage_is_named_and_nothing_is_overwritten(name, damage, reason, begun):
    config, folder = begun
    for path in (folder / "checkpoints").glob("step-*"):
        if path.name != "step-000008":
            shutil.rmtree(path)
    damage(folder / "checkpoints" / "step-000008" / name)
    before = contents(folder)
    expected = rf"step-000008/{name} is missing, truncated or damaged \(.*({reason}).*no other checkpoint is whole"
    with pytest.raises(ValueError, match=expected) as error:
        alone(config, folder)
    assert "\n" not in str(error.value)
    assert contents(folder) == before


def test_workers_of_an_elastic_run_may_set_the_same_checkpoint_aside(begun, monkeypatch, capsys):
    """Each loads for itself. Three found the damage before one of them renamed the folder: the others failed."""
    config, folder = begun
    (folder / "checkpoints" / "step-000008" / "shared.pt").unlink()
    found, set_aside = threading.Barrier(3, timeout=60), checkpoint.set_aside
    monkeypatch.setattr(checkpoint, "set_aside", lambda *args: (found.wait(), set_aside(*args)))
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda _: alone(replace(config, workers=1), folder), range(3)))
    assert capsys.readouterr().err.count("kept as damaged") == 1
    names = {path.name for path in (folder / "checkpoints").iterdir() if "damaged" in path.name}
    assert names == {"damaged-step-000008"} and (folder / "checkpoints/damaged-step-000008/checkpoint.json").exists()


def test_a_checkpoint_that_another_worker_removes_meanwhile_is_not_damaged(begun, monkeypatch, capsys):
    """A worker that joins an elastic run may find a checkpoint just when the others tidy up."""
    config, folder = begun
    read_all = checkpoint._read_all

    def read(path, comm, started):
        if path.name == "step-000008":
            path.rename(path.with_name(f".{path.name}"))
        return read_all(path, comm, started)

    monkeypatch.setattr(checkpoint, "_read_all", read)
    alone(replace(config, workers=1), folder)
    assert capsys.readouterr().err == ""


def alone(config: RunConfig, folder: Path) -> list[checkpoint.Loaded]:
    """Load the last checkpoint on all workers, as threads."""
    data = config.data.load()

    def worker(comm):
        torch.manual_seed(0)
        model = config.model.build(data.num_classes)
        optimizer = config.optimizer.build(model)
        strategy = config.parsed_strategy().attach(model, optimizer, comm=comm)
        training = Training(config, model, model, optimizer, torch.amp.GradScaler("cpu", enabled=False), strategy)
        return load_latest(
            folder / "checkpoints", training, Meter(data, strategy, training.virtual), comm, comm.rank == 0
        )

    return LocalWorld(config.workers).run(worker)


def test_a_checkpoint_knows_how_many_rounds_were_committed(begun):
    """By them states of elastic workers are ordered. Local updates have fewer rounds than steps, fixed workers as many."""
    config, folder = begun
    assert [loaded.rounds for loaded in alone(config, folder)] == [8, 8]
    edit("rounds", 3)(folder / "checkpoints/step-000008/checkpoint.json")
    assert [(loaded.step, loaded.rounds) for loaded in alone(config, folder)] == [(8, 3)] * 2


@pytest.mark.parametrize(
    "name, change, reason",
    [
        ("worker-1.pt", {"meter": 5}, "TypeError: 'int' object is not subscriptable"),
        ("worker-0.pt", {"averager": []}, r"load_state_dict takes what state_dict\(\) returned, such as .*, got list"),
        ("worker-0.pt", {"carried": "no tensor"}, "TypeError: the state of a recurrent model"),
        ("shared.pt", {"model": 5}, "TypeError"),
    ],
)
def test_entries_of_the_wrong_type_name_the_checkpoint_and_the_remedy(name, change, reason, begun):
    config, folder = begun
    path = folder / "checkpoints" / "step-000008" / name
    torch.save(torch.load(path, weights_only=True) | change, path)
    expected = rf"step-000008 does not fit this run; it is damaged, or of another .*{reason}.*Remove this folder"
    with pytest.raises(ValueError, match=expected):
        alone(config, folder)


@pytest.mark.parametrize(
    "line, reason",
    [
        (b"5", "expected a row of metrics, got int"),
        (b'{"loss": 1}', "it has no step"),
        (b'{"step": "x"}', "step is 'x'"),
        (b'{"step": 1, "zzz": "3"}', "zzz should be a number"),
        (b"\xff\xfe", "utf|Expecting|decode"),
    ],
)
def test_a_damaged_row_is_named_by_file_and_line(line, reason, tmp_path):
    """These ended in TypeError, KeyError and UnicodeDecodeError, or all later rows were lost without a word."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
    with pytest.raises(ValueError, match=rf"line 2 of {path} is damaged: .*({reason}).*; remove that line"):
        read_rows(path, 9)


def test_a_damaged_summary_is_written_anew(begun, finished, capfd):
    config, folder = begun
    (folder / "checkpoints" / ".step-000009").rename(folder / "away")
    shutil.copytree(finished / "checkpoints" / "step-000009", folder / "checkpoints" / "step-000009")
    (folder / "summary.json").write_text("{")
    assert train(config) == folder
    assert "summary.json is damaged" in capfd.readouterr().err
    summaries = [json.loads((each / "summary.json").read_text()) for each in (folder, finished)]
    assert {**summaries[0], "seconds": 0} == {**summaries[1], "seconds": 0}


def test_a_full_disk_is_named_whatever_pytorch_says(tmp_path, monkeypatch):
    """PyTorch's writer said "unexpected pos 6784 vs 6736"."""

    class Full(io.BytesIO):
        def write(self, data):
            if self.tell() + len(data) > 5000:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    monkeypatch.setattr(Path, "open", lambda *_: Full())
    with pytest.raises(OSError) as caught:
        checkpoint._write(tmp_path / "shared.pt", {f"w{i}": torch.ones(100) for i in range(100)})
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / "shared.pt"))


@pytest.mark.parametrize("name", ["shared.pt", "worker-0.pt"])
def test_a_checkpoint_of_another_model_or_strategy_is_refused(name, begun, tmp_path):
    """Files that say to be of this run, and are not."""
    config, folder = begun
    path = folder / "checkpoints" / "step-000008" / name
    state = torch.load(path, weights_only=True)
    if name == "shared.pt":
        state["model"] = DigitsNet(width=8).build().state_dict()
    else:
        state["averager"]["rank0"]["memory"] = None
    torch.save(state, path)
    with pytest.raises(
        ValueError,
        match="step-000008 does not fit this run; .* of another model, optimizer or strategy .*(size mismatch|memory)",
    ):
        train(config)


def test_names_that_are_free_taken_or_nobodys(tmp_path):
    config = replace(CONFIG, output=tmp_path, resume=True)
    assert make_folder(config) == tmp_path / "run" == make_folder(config)  # nothing there yet, and nothing begun
    (tmp_path / "run" / "config.json").write_text("{}")
    (tmp_path / "run" / "worker-1-error.txt").write_text("the data was not there")
    assert make_folder(config) == tmp_path / "run"  # ended before its first row: a mistake that can be mended
    assert not (tmp_path / "run" / "worker-1-error.txt").exists()
    assert make_folder(replace(config, name=None)).name == replace(config, name=None).default_name
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    with pytest.raises(ValueError, match="not a run"):
        make_folder(replace(config, name="thesis"))
    with pytest.raises(ValueError, match="resume goes on .* overwrite replaces"):
        replace(config, overwrite=True)


def test_rows_are_cut_back_to_the_checkpoint(tmp_path):
    first = MetricsWriter(tmp_path)
    for step in (1, 2, 3):
        first.row({"step": step, "loss": step / 3})
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4')
    second = MetricsWriter(tmp_path, done=2)
    second.row({"step": 3, "loss": 7.0})
    second.close()
    assert read_rows(tmp_path / "metrics.jsonl", 9) == [
        *({"step": 1, "loss": 1 / 3}, {"step": 2, "loss": 2 / 3}, {"step": 3, "loss": 7.0})
    ]
    assert [line.split(",")[0] for line in (tmp_path / "metrics.csv").read_text().splitlines()] == [
        "step",
        "1",
        "2",
        "3",
    ]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, round(event.value, 3)) for event in events.Scalars("loss")] == [
        (1, 0.333),
        (2, 0.667),
        (3, 7.0),
    ]


def test_a_second_row_of_a_step_replaces_the_first_one_also_after_a_resume(tmp_path):
    """With a quorum, a checkpoint may have the row of a step, and the test comes after a round that completes none."""
    first = MetricsWriter(tmp_path)
    for step in (1, 2):
        first.row({"step": step, "loss": step / 3})
    first.row({"step": 2, "loss": 0.5})
    first.close()
    assert [row["loss"] for row in read_rows(tmp_path / "metrics.jsonl", 9)] == [1 / 3, 0.5]
    second = MetricsWriter(tmp_path, done=2)
    for step in (2, 3):
        second.row({"step": step, "loss": 7.0 + step})
    second.close()
    assert [row["loss"] for row in read_rows(tmp_path / "metrics.jsonl", 9)] == [1 / 3, 9.0, 10.0]
    written = (tmp_path / "metrics.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in written] == ["step", "1", "2", "3"]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the kernel's table of processes is Linux's")
def test_a_run_of_four_processes_that_is_killed_goes_on_with_the_same_bits(tmp_path):
    options = ["--strategy", "Gradients(Mean(TopK(0.05), MomentumCorrection(0.9)))", "--optimizer.momentum", "0"]
    options += ["--max-steps", "12", "--log-every", "1", "--checkpoint-every", "1", "--model.width", "4"]
    command = ("train", "digits", "--workers", "4", *options)
    whole = thinwire(*command, "--name", "whole", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    folder = tmp_path / "runs" / "killed"
    pipe = held_at(folder, step=7)
    with started(["-m", "thinwire", *command, "--name", "killed", "--resume"], tmp_path) as killed:
        killed.wait_until(
            lambda: (latest(folder / "checkpoints") or Path()).name > "step-000002", "the checkpoint after three steps"
        )
        processes = below(killed.pid)
        killed.kill()
        killed.wait()
        wait_until(lambda: not any(Path(f"/proc/{process}").exists() for process in processes), "the workers' end")
    pipe.unlink()
    assert len(processes) > 4 and not (folder / "summary.json").exists()
    resumed = thinwire(*command, "--name", "killed", "--resume", cwd=tmp_path)
    assert resumed.returncode == 0 and resumed.stderr == "", resumed.stderr
    assert "goes on after step" in resumed.stdout
    assert without_times(folder) == without_times(tmp_path / "runs" / "whole")
    models = [
        torch.load(tmp_path / "runs" / name / "checkpoints" / "step-000012" / "shared.pt", weights_only=True)["model"]
        for name in ("whole", "killed")
    ]
    assert all(torch.equal(value, models[1][name]) for name, value in models[0].items())
    again = thinwire(*command, "--name", "killed", "--resume", cwd=tmp_path)
    assert again.returncode == 0 and "accuracy" in again.stdout and "step" not in again.stdout


@pytest.mark.parametrize("change", ["deleted", "replaced"])
def test_metrics_that_were_deleted_or_replaced_in_mid_run_are_written_anew(tmp_path, change, capsys):
    writer = MetricsWriter(tmp_path)
    writer.row({"step": 1, "loss": 3.0})
    before = (tmp_path / "metrics.csv").read_bytes()
    for name in ("metrics.jsonl", "metrics.csv"):
        (tmp_path / name).unlink()
        if change == "replaced":
            (tmp_path / name).write_text("something else\n")
    writer.row({"step": 2, "loss": 2.0})
    writer.row({"step": 3, "loss": 1.0})
    writer.close()
    assert [row["loss"] for row in read_rows(tmp_path / "metrics.jsonl", 9)] == [3.0, 2.0, 1.0]
    written = (tmp_path / "metrics.csv").read_bytes()
    assert written.startswith(before) and written.count(b"\r\n") == 4
    assert capsys.readouterr().err.count("was deleted or replaced, and is written anew") == 2
