"""Runs with a quorum: workers of unequal numbers of steps, rows and checkpoints at the same commits, and going on."""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import replace

import pytest
import torch
from helpers.interruptions import NEVER, Requests
from helpers.spawn import run_threads

from thinwire.lab.train import RunConfig, train
from thinwire.lab.train.models import DigitsNet
from thinwire.lab.train.optimize import SGD
from thinwire.lab.train.results.callbacks import EachStep, gradient_spectra
from thinwire.lab.train.run import loop
from thinwire.lab.train.step import training
from thinwire.sampler import ElasticSampler
from thinwire.strategy.local.quorum import StepTimer

BATCH = 16
CONFIG = RunConfig(
    "digits",
    "asynchronous_diloco(every=4, delay=2)",
    workers=3,
    batch_size=BATCH,
    epochs=2,
    log_every=3,
    keep=9,
    model=DigitsNet(width=4),
    optimizer=SGD(0.05),
)
PER_STEP = 3 * BATCH


@pytest.fixture
def unequal(monkeypatch):
    """Clocks that only steps advance: worker 2 needs three times as long for a step as the others."""
    own, taken = threading.local(), {}
    monkeypatch.setattr(StepTimer, "now", staticmethod(lambda: getattr(own, "now", 0.0)))
    step = training.Training.step

    def counted(self, batches, weight=1.0):
        rank = self.strategy.comm.rank
        own.now = getattr(own, "now", 0.0) + (0.3 if rank == 2 else 0.1)
        taken[rank] = taken.get(rank, 0) + 1
        return step(self, batches, weight)

    monkeypatch.setattr(training.Training, "step", counted)
    return taken


@pytest.fixture
def blocks(monkeypatch):
    """The blocks that rounds have committed, as worker 1 sees them."""
    found, committed = [], ElasticSampler.committed

    def noted(self, parts, gone):
        committed(self, parts, gone)
        if self._comm.rank == 1:
            found.extend(block for some in self.last_committed.values() for block in some)

    monkeypatch.setattr(ElasticSampler, "committed", noted)
    return found


def run(config, folder, monkeypatch, signal=NEVER):
    """In threads of this process; strategy and metrics share a communicator, because the strategy sends by channels alone."""
    monkeypatch.setattr(training, "_communicator", lambda config, device, comm, layout: comm)
    folder.mkdir(exist_ok=True)
    run_threads(3, lambda comm: loop.run(config, folder, comm, signal))
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_progress_is_what_is_committed_and_a_run_goes_on_from_its_checkpoint(unequal, blocks, tmp_path, monkeypatch):
    rows = run(CONFIG, tmp_path / "run", monkeypatch)
    steps = [row["step"] for row in rows]
    last, per_epoch = rows[-1], 1258 // PER_STEP
    assert steps == sorted(set(steps)) and steps[-1] == 2 * per_epoch and last["epoch"] == 2
    assert sorted(blocks) == [(epoch, number) for epoch in range(2) for number in range(1258 // BATCH)]
    assert 2 * unequal[2] < unequal[0] and abs(unequal[0] - unequal[1]) <= 6  # at its own speed
    # Every step that a worker took is committed in the end, and nothing else is.
    assert sum(unequal.values()) * BATCH // PER_STEP == last["step"] and last["dropped_changes"] == 0
    assert last["merged_changes"] > 2 * last["committed"] and last["late_changes"] == 0
    assert last["loss"] < rows[0]["loss"] and last["consensus_distance"] < 1e-6
    assert [row["step"] for row in rows if "test_accuracy" in row] == [per_epoch, 2 * per_epoch]
    assert all(row["examples_per_second"] > 0 and row["compute_seconds"] >= 0 for row in rows)

    checkpoints = sorted((tmp_path / "run/checkpoints").glob("step-*"))
    first = int(checkpoints[0].name[5:])
    assert first == per_epoch
    before = torch.load(checkpoints[0] / "worker-2.pt")["averager"]
    for path in checkpoints[1:]:
        shutil.rmtree(path)
    (tmp_path / "run/summary.json").unlink()
    unequal.clear()
    blocks.clear()
    again = run(replace(CONFIG, resume=True, name="run"), tmp_path / "run", monkeypatch)
    assert [row for row in again if row["step"] <= first] == [row for row in rows if row["step"] <= first]
    assert again[-1]["step"] == 2 * per_epoch and sorted(blocks) == [(1, number) for number in range(1258 // BATCH)]
    saved = next(value for value in before.values() if "num_steps" in value)
    tokens = saved["fragments"][0]["committed_tokens"]
    assert (tokens + sum(unequal.values()) * BATCH) // PER_STEP == again[-1]["step"] and tokens // PER_STEP == first
    after = torch.load(tmp_path / f"run/checkpoints/step-{again[-1]['step']:06d}/worker-2.pt")["averager"]
    assert next(v for v in after.values() if "num_steps" in v)["num_steps"] == saved["num_steps"] + unequal[2]


def test_a_step_has_one_row_where_an_epoch_ends_with_less_than_a_step(unequal, blocks, tmp_path, monkeypatch):
    """Of its 62 blocks, 60 make 20 steps of three workers; the row of step 20 begins before the last two are committed."""
    rows = run(replace(CONFIG, batch_size=20, log_every=1), tmp_path / "run", monkeypatch)
    steps = [row["step"] for row in rows]
    assert steps == sorted(set(steps)) and len(blocks) == 2 * 62
    assert [row["step"] for row in rows if "test_accuracy" in row] == [20, 41]
    assert all(row["examples_per_second"] > 0 for row in rows)


def test_a_step_has_one_row_where_workers_meet_before_an_epoch_ends_with_less_than_a_step(
    unequal, blocks, tmp_path, monkeypatch
):
    """All meet at step 20 for its checkpoint, which has the row, and again for the test after the last two blocks."""
    config = replace(CONFIG, batch_size=20, log_every=7, checkpoint_every=1)
    rows = run(config, tmp_path / "run", monkeypatch)
    steps = [row["step"] for row in rows]
    assert steps == sorted(set(steps)) and [row["step"] for row in rows if "test_accuracy" in row][0] == 20


def test_a_signal_stops_all_workers_at_the_same_commit(unequal, tmp_path, monkeypatch):
    """The agreement that `Interruption` reaches, without its signal."""
    calls = threading.local()

    def requested(comm):
        calls.number = getattr(calls, "number", 0) + 1
        return 15 * (calls.number == 3)

    config = replace(CONFIG, epochs=30)
    with pytest.raises(loop.Interrupted) as stop:
        run(config, tmp_path / "run", monkeypatch, Requests(requested))
    checkpoint = json.loads((stop.value.checkpoint / "checkpoint.json").read_text())
    assert stop.value.signal == 15 and checkpoint["step"] == checkpoint["row"]["step"]
    assert sum(unequal.values()) * BATCH // PER_STEP == checkpoint["step"] < 30 * (1258 // PER_STEP)


def test_processes_train_with_a_quorum(tmp_path):
    config = replace(
        CONFIG, workers=2, epochs=1, output=tmp_path, name="run", strategy="asynchronous_diloco(4, delay=1)"
    )
    folder = train(config)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == -(-(1258 // BATCH) // 2) and rows[-1]["consensus_distance"] < 1e-6
    assert rows[-1]["late_changes"] <= rows[-1]["merged_changes"] and rows[-1]["bytes_sent"] > 0
    assert json.loads((folder / "summary.json").read_text())["final"]["steps"] == rows[-1]["step"]


def test_what_needs_common_steps_is_refused():
    with pytest.raises(ValueError, match="take unequal numbers of steps.*leave --network out"):
        RunConfig("digits", CONFIG.strategy, network="1gbit,1ms").parsed_strategy()
    with pytest.raises(ValueError, match="needs a fixed number of workers; leave --elastic out"):
        RunConfig("digits", CONFIG.strategy, elastic=True).parsed_strategy()
    with pytest.raises(ValueError, match="take blocks of data as fast as they are.*leave split and data.in_order out"):
        RunConfig("digits", CONFIG.strategy, split="by-class").parsed_strategy()
    with pytest.raises(ValueError, match="called only where all workers meet"):
        train(CONFIG, callbacks=[EachStep(gradient_spectra)])
