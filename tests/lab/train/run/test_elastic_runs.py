"""Runs of the lab whose workers are killed and come back."""

from __future__ import annotations

import json
import shutil
import signal
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.elastic_training import elastic_run, on_own_disk, run_without_fork_server
from helpers.program import Program, below, programs, wait_until

from thinwire.comm import ElasticCommunicator, Lighthouse
from thinwire.comm.tcp import endpoint
from thinwire.lab.report import write_report
from thinwire.lab.train import RunConfig, train
from thinwire.lab.train.data import CIFAR10
from thinwire.lab.train.folder import checkpoint
from thinwire.lab.train.models import DigitsNet
from thinwire.lab.train.results.metrics_files import read_rows
from thinwire.lab.train.run import loop
from thinwire.lab.train.run.interrupt import Interruption
from thinwire.lab.train.run.state import RunState
from thinwire.lab.train.run.workers import shared_settings

NUM_BLOCKS = 1258 // 32  # of the digits in batches


def committed_blocks(folder):
    """Those of all rounds that any worker has committed; workers of the same round must agree."""
    rounds = {}
    for path in folder.iterdir():
        for line in path.read_text().splitlines():
            number, blocks = json.loads(line)
            assert rounds.setdefault(number, blocks) == blocks
    return [block for blocks in rounds.values() for block in blocks]


def test_killed_workers_are_started_again_and_healed_and_all_end_with_the_same_bits(tmp_path):
    """Worker 2 dies, then worker 0, which writes the metrics; a choice for each layer is measured before and after both."""
    strategy = "Gradients(Mean(Fitted(chain(TopK(0.05), QSGD(bits=4)), measure_steps=(1, 5, 9, 12)), ErrorFeedback()))"
    program = Program(elastic_run, str(tmp_path), strategy, 2, False, folder=tmp_path)
    assert program.wait(400) == 0, program.stderr
    for number in (0, 2):
        assert f"worker {number} was ended by SIGKILL; it is started again" in program.stderr
        assert f"worker {number} is gone after step" in program.stderr, program.stderr
    rows = [json.loads(line) for line in (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows]
    assert steps == sorted(set(steps)) and steps[-1] == rows[-1]["committed"]
    assert rows[-1]["healings"] >= 2 and rows[-1]["models"] == 1 and rows[-1]["test_accuracy"] > 0.3, rows[-1]
    assert len({row["error"] for row in rows if "error" in row}) > 2  # as often it was measured, and agreed upon
    assert all(row["bits"] <= row["budget_bits"] for row in rows)
    seconds = [row["seconds"] for row in rows]
    assert max(b - a for a, b in zip(seconds, seconds[1:], strict=False)) < 50  # not the time limit, which is 60
    blocks = committed_blocks(tmp_path / "blocks")
    each = [[epoch, n] for epoch in range(2) for n in range(NUM_BLOCKS)]
    assert sorted(blocks)[: 2 * NUM_BLOCKS] == each  # once
    description = json.loads(next((tmp_path / "runs/run/checkpoints").glob(f"step-*{steps[-1]}/*.json")).read_text())
    assert description["position"]["next"] - len(description["position"]["returned"]) == len(blocks)
    summary = json.loads((tmp_path / "runs/run/summary.json").read_text())
    assert summary["healings"] == rows[-1]["healings"] and summary["final"]["steps"] == steps[-1]
    page = write_report([tmp_path / "runs"], tmp_path / "report").page.read_text()
    assert "Workers of elastic runs" in page


def test_a_run_goes_on_from_the_newest_checkpoint_that_any_worker_has_on_its_own_disk(tmp_path, monkeypatch):
    """Worker 2 dies while it saves step 8, and all others are killed then. Worker 0 loses its disk, and a file of 2 is cut."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    disks = [tmp_path / str(number) for number in range(3)]
    checkpoints = [disk / "runs/run/checkpoints" for disk in disks]

    @contextmanager
    def workers(order):
        place = Lighthouse(3, "127.0.0.1", join_seconds=60.0)
        arguments = [(str(disks[number]), number, place.address) for number in order]
        with programs(on_own_disk, arguments, tmp_path) as started:
            yield started
        place.close()

    for disk in disks:
        disk.mkdir()
    (disks[2] / "dies-step-000008").touch()
    with workers(range(3)) as started:
        wait_until(lambda: all((path / "step-000008").is_dir() for path in checkpoints[:2]), "the checkpoints")
        processes = [process for program in started[:2] for process in below(program.pid)]
        assert started[2].wait(400) == -signal.SIGKILL
    wait_until(lambda: not any(Path(f"/proc/{process}").exists() for process in processes), "the workers' end")
    for path in checkpoints:
        assert {part.name for part in path.glob("step-*/worker-*")} == {f"worker-{checkpoints.index(path)}.pt"}
    assert checkpoint.latest(checkpoints[2]).name == "step-000006"
    shutil.rmtree(disks[0])
    disks[0].mkdir()
    (disks[2] / "dies-step-000008").unlink()
    damaged = checkpoints[2] / "step-000006/shared.pt"
    damaged.write_bytes(damaged.read_bytes()[:-1000])

    with workers((2, 1, 0)) as started:
        assert [program.wait(400) for program in started] == [0, 0, 0], [program.stderr for program in started]
        said = started[0].stderr
    assert "step-000006/shared.pt is missing, truncated or damaged" in said
    assert "the run goes on from the state of other workers, and step-000006 is kept as damaged-" in said, said
    steps = [[row["step"] for row in read_rows(disk / "runs/run/metrics.jsonl", 99)] for disk in disks]
    assert steps == [[9, 10, 11, 12], list(range(1, 13)), [*range(1, 9), 9, 10, 11, 12]]
    states = [torch.load(path / "step-000012/shared.pt", weights_only=True)["model"] for path in checkpoints]
    assert all(torch.equal(value, other[name]) for other in states[1:] for name, value in states[0].items())
    assert {json.loads((path / "step-000012/checkpoint.json").read_text())["rounds"] for path in checkpoints} == {12}
    assert [json.loads((disk / "runs/run/summary.json").read_text())["workers"] for disk in disks] == [3, 3, 3]


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_again(tmp_path, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    config = RunConfig("digits", elastic=True, workers=1, batch_size=200, max_steps=2, model=DigitsNet(width=4))
    place = Lighthouse(1, "127.0.0.1")

    def run():
        with ElasticCommunicator(place.address, 0, min_workers=1) as comm:
            loop.run(config, tmp_path, comm, Interruption())

    run()
    (tmp_path / "checkpoints/step-000002/worker-0.pt").write_bytes(b"")
    for _ in range(2):  # and not at the second try
        with pytest.raises(
            ValueError, match=r"step-000002/worker-0.pt is missing, .* no other checkpoint is whole. Restore"
        ):
            run()
    place.close()


def test_a_worker_of_a_run_that_replaces_another_reads_no_checkpoint_of_that(tmp_path, monkeypatch):
    """It may come before the first worker of the command has emptied the folder. One that is started again reads its own."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    config = RunConfig("digits", elastic=True, workers=2, batch_size=200, max_steps=2, model=DigitsNet(width=4))

    def run(number, is_restart=False, **options):
        place = Lighthouse(1, "127.0.0.1")
        with ElasticCommunicator(place.address, number, min_workers=1) as comm:
            loop.run(replace(config, **options), tmp_path, comm, Interruption(), is_restart=is_restart)
        place.close()

    run(0)
    first = (tmp_path / "checkpoints/step-000002/worker-0.pt").read_bytes()
    run(1, overwrite=True, max_steps=1)
    assert (tmp_path / "checkpoints/step-000001/worker-1.pt").exists()
    assert (tmp_path / "checkpoints/step-000002/worker-0.pt").read_bytes() == first
    (tmp_path / "checkpoints/step-000002/worker-0.pt").write_bytes(b"")
    (tmp_path / "checkpoints/step-000001/worker-1.pt").write_bytes(b"")
    with pytest.raises(ValueError, match="no other checkpoint is whole"):
        run(1, is_restart=True, overwrite=True)


def test_options_of_elastic_runs_are_checked(tmp_path):
    with pytest.raises(ValueError, match="no use for min_workers, lighthouse, check_every without elastic; add"):
        RunConfig("digits", lighthouse="http://node1:29510", min_workers=3, check_every=0)
    with pytest.raises(ValueError, match="take no connections need a relay; add --relay HOST:PORT"):
        RunConfig("digits", elastic=True, listen=False)
    with pytest.raises(ValueError, match="leave out network, split"):
        RunConfig("digits", elastic=True, network="1gbit,1ms", split="by-class")
    with pytest.raises(ValueError, match=r"Asynchronous\(\) needs a fixed number of workers; leave --elastic out"):
        RunConfig("digits", "Asynchronous()", elastic=True).parsed_strategy()
    with pytest.raises(ValueError, match="leave out transport mpi"):
        RunConfig("digits", elastic=True, transport="mpi")
    with pytest.raises(ValueError, match="leave out transport gloo"):
        RunConfig("digits", elastic=True, transport="gloo")
    RunConfig("digits", elastic=True, transport="tcp")


def test_without_the_extension_elastic_runs_are_refused_in_one_line_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(endpoint, "is_available", lambda: False)
    line = "^elastic runs need the extension thinwire.comm.tcp._engine, which was not built. Install thinwire with a C"
    with pytest.raises(ValueError, match=line):
        train(RunConfig("digits", workers=2, elastic=True, output=tmp_path))
    assert not [*tmp_path.iterdir()]
    with pytest.raises(ValueError, match=line):  # before it asks the Lighthouse
        ElasticCommunicator("http://127.0.0.1:1")


def test_an_interface_is_for_elastic_runs_too(tmp_path):
    with pytest.raises(ValueError, match="has no network interface 'wire9'; choose --interface among"):
        train(RunConfig("digits", workers=2, elastic=True, interface="wire9", output=tmp_path))


def test_a_killed_fork_server_is_started_again_with_all_workers_which_go_on_from_the_checkpoint(tmp_path):
    program = Program(run_without_fork_server, str(tmp_path), True, folder=tmp_path)
    assert program.wait(400) == 0, program.stderr
    for number in (0, 1):
        line = f"the fork server, the process that starts the workers, was killed, and worker {number} with it; it is"
        assert line in program.stderr, program.stderr
    rows = [json.loads(line) for line in (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 9)) and (tmp_path / "runs/run/summary.json").exists()


def test_a_killed_fork_server_is_named_in_other_runs(tmp_path):
    program = Program(run_without_fork_server, str(tmp_path), False, folder=tmp_path)
    assert program.wait(400) == 0, program.stderr
    assert "WorkerError: the fork server, the process that starts the workers, was killed, and all" in program.stdout


def test_an_impossible_position_in_the_run_is_refused():
    sent = vars(RunState(7))
    state = RunState()
    state.load(sent | {"meter": {}})
    assert state == RunState(7)
    for wrong in (
        {"done": 2**63},
        {"done": -1},
        {"aborted": -1},
        {"healings": "2"},
        {"row_is_due": 1},
        {"row": []},
    ):
        with pytest.raises(ValueError, match="impossible position in the run"):
            state.load(sent | wrong)
    assert state == RunState(7)


def test_joiners_compare_what_a_run_must_have_in_common():
    config = RunConfig("digits", seed=1, workers=2, threads=1)
    assert shared_settings(config) == shared_settings(
        replace(config, workers=3, first_worker=2, elastic=True, threads=2)
    )
    for other in (
        {"seed": 2},
        {"batch_size": 7},
        {"strategy": "Gradients(Mean(TopK(0.1)))"},
        {"strategy": "Gradients(Mean(), on_nonfinite='apply')"},
        {"strategy": "Local(Mean(), every=4)"},
        {"log_every": 3},
    ):
        assert shared_settings(config) != shared_settings(replace(config, **other))
    assert "folder" not in shared_settings(RunConfig("x", data=CIFAR10()))["data"]
