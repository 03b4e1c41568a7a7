"""Runs of the lab whose workers are killed and come back."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from helpers.elastic_training import elastic_run, run_without_fork_server
from helpers.program import Program

from thinwire.lab.report import write_report
from thinwire.lab.train import RunConfig, train
from thinwire.lab.train.data import CIFAR10
from thinwire.lab.train.run.state import RunState
from thinwire.lab.train.run.workers import shared_settings
from thinwire.lab.train.start.lighthouse import communicator
from thinwire.lab.train.step.steps import Place

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
    assert program.wait(150) == 0, program.stderr
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


def test_options_of_elastic_runs_are_checked(tmp_path):
    with pytest.raises(ValueError, match="belong to elastic; add --elastic"):
        RunConfig("digits", lighthouse="http://node1:29510")
    with pytest.raises(ValueError, match="leave out network, split"):
        RunConfig("digits", elastic=True, network="1gbit,1ms", split="by-class")
    with pytest.raises(ValueError, match=r"Asynchronous\(\) needs a fixed number of workers; leave --elastic out"):
        RunConfig("digits", "Asynchronous()", elastic=True).parsed_strategy()
    with pytest.raises(ValueError, match="leave out transport mpi"):
        RunConfig("digits", elastic=True, transport="mpi")
    with pytest.raises(ValueError, match="worker 1 has none; choose --transport gloo"):
        communicator(RunConfig("digits", elastic=True, transport="nccl", device="cpu"), "http://127.0.0.1:1", 1, 2)


def test_an_interface_is_for_elastic_runs_too(tmp_path):
    with pytest.raises(ValueError, match="has no network interface 'wire9'; choose --interface among"):
        train(RunConfig("digits", workers=2, elastic=True, interface="wire9", output=tmp_path))


def test_a_killed_fork_server_is_started_again_with_all_workers_which_go_on_from_the_checkpoint(tmp_path):
    program = Program(run_without_fork_server, str(tmp_path), True, folder=tmp_path)
    assert program.wait(150) == 0, program.stderr
    for number in (0, 1):
        line = f"the fork server, the process that starts the workers, was killed, and worker {number} with it; it is"
        assert line in program.stderr, program.stderr
    rows = [json.loads(line) for line in (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 9)) and (tmp_path / "runs/run/summary.json").exists()


def test_a_killed_fork_server_is_named_in_other_runs(tmp_path):
    program = Program(run_without_fork_server, str(tmp_path), False, folder=tmp_path)
    assert program.wait(150) == 0, program.stderr
    assert "WorkerError: the fork server, the process that starts the workers, was killed, and all" in program.stdout


def test_an_impossible_position_in_the_run_is_refused():
    sent = vars(RunState(7, Place(4, 0, 64), 2)) | {"origin": [4, 0, 64]}
    state = RunState()
    state.load(sent | {"meter": {}})
    assert state == RunState(7, Place(4, 0, 64), 2)
    for wrong in (
        {"done": 2**63},
        {"done": -1},
        {"size": 0},
        {"size": 2**40},
        {"origin": [0, -1, 0]},
        {"origin": [9, 0, 0]},
    ):
        with pytest.raises(ValueError, match="impossible position in the run"):
            state.load(sent | wrong)
    assert state == RunState(7, Place(4, 0, 64), 2)


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
