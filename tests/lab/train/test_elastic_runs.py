"""Runs of the lab whose workers are killed and come back."""

from __future__ import annotations

import json

import pytest
from helpers.elastic_training import elastic_run
from helpers.program import Program

from thinwire.lab.report import write_report
from thinwire.lab.train import RunConfig, train
from thinwire.lab.train.elastic_spawn import communicator


def test_killed_workers_are_started_again_and_healed_and_all_end_with_the_same_bits(tmp_path):
    """Worker 2 dies, then worker 0, which writes the metrics. Then other settings of the same run go on from its checkpoint."""
    averager = "Mean(chain(TopK(0.05), QSGD(bits=4)), ErrorFeedback())"
    program = Program(elastic_run, str(tmp_path), averager, 2, False, folder=tmp_path)
    assert program.wait(150) == 0, program.stderr
    for number in (0, 2):
        assert f"worker {number} was ended by SIGKILL; it is started again" in program.stderr
        assert f"worker {number} is gone after step" in program.stderr, program.stderr
    rows = [json.loads(line) for line in (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows]
    assert steps == sorted(set(steps)) and steps[-1] == rows[-1]["committed"]
    assert rows[-1]["healings"] >= 2 and rows[-1]["models"] == 1 and rows[-1]["test_accuracy"] > 0.3, rows[-1]
    seconds = [row["seconds"] for row in rows]
    assert max(b - a for a, b in zip(seconds, seconds[1:], strict=False)) < 30  # not the time limit, which is 60
    summary = json.loads((tmp_path / "runs/run/summary.json").read_text())
    assert summary["healings"] == rows[-1]["healings"] and summary["final"]["steps"] == steps[-1]
    page = write_report([tmp_path / "runs"], tmp_path / "report").page.read_text()
    assert "Workers of elastic runs" in page


def test_options_of_elastic_runs_are_checked(tmp_path):
    with pytest.raises(ValueError, match="belong to elastic; add --elastic"):
        RunConfig("digits", lighthouse="http://node1:29510")
    with pytest.raises(ValueError, match="leave out network, split"):
        RunConfig("digits", elastic=True, network="1gbit,1ms", split="by-class")
    with pytest.raises(ValueError, match="has no rounds; leave --elastic out"):
        RunConfig("digits", "Pairwise()", elastic=True).parsed_averager()
    with pytest.raises(ValueError, match="leave out backend mpi"):
        RunConfig("digits", elastic=True, backend="mpi")
    with pytest.raises(ValueError, match="worker 1 has none; choose --backend gloo"):
        communicator(RunConfig("digits", elastic=True, backend="nccl", device="cpu"), "http://127.0.0.1:1", 1, 2)


def test_an_interface_is_for_elastic_runs_too(tmp_path):
    with pytest.raises(ValueError, match="has no network interface 'wire9'; choose --interface among"):
        train(RunConfig("digits", workers=2, elastic=True, interface="wire9", output=tmp_path))
