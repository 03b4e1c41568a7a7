"""Metrics of the user's own: they join the rows, and cost no measured bytes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from thinwire import LocalWorld
from thinwire.lab.train import EachStep, RunConfig, gradient_spectra, train, worker_differences
from thinwire.lab.train.models import DigitsNet
from thinwire.lab.train.results.callbacks import called
from thinwire.lab.train.results.metrics_files import MetricsWriter

CONFIG = RunConfig("digits", workers=2, batch_size=100, max_steps=2, log_every=1, model=DigitsNet(width=4))


def squared(model, row, comm):
    return {"mean_step": comm.all_reduce(torch.tensor([float(row["step"])])).wait().item() / comm.size}


def nothing(model, row, comm):
    return None


def taken(model, row, comm):
    return {"loss": 0.0}


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_values_of_callbacks_join_the_rows(tmp_path):
    config = replace(CONFIG, strategy="Gossip(Mix(Ring()))", output=tmp_path)
    rows = rows_of(train(replace(config, name="with"), callbacks=[squared, worker_differences]))
    assert [row["mean_step"] for row in rows] == [1.0, 2.0]
    assert all(row["difference_norm"] > 0 and 0 < row["difference_rank1_share"] <= 1 for row in rows)
    without = rows_of(train(replace(config, name="without")))
    assert [row["bytes_sent"] for row in rows] == [row["bytes_sent"] for row in without]


@pytest.mark.parametrize(
    ("callback", "message"), [(nothing, "must return a mapping"), (taken, "a value 'loss' already")]
)
def test_a_callback_that_returns_something_else_is_named(callback, message):
    def worker(comm):
        called([callback], nn.Linear(2, 2), {"step": 1, "loss": 1.0}, comm)

    with pytest.raises(ValueError, match=f"callback {callback.__name__}.*{message}"):
        LocalWorld(1).run(worker)


def test_differences_between_workers_by_their_singular_values():
    """Worker 1 differs from worker 0 by diag(3, 4), of which rank 1 holds 16/25."""

    def worker(comm):
        model = nn.Linear(2, 2)
        with torch.no_grad():
            model.weight.copy_(comm.rank * torch.diag(torch.tensor([3.0, 4.0])))
        return worker_differences(model, {}, comm)

    for found in LocalWorld(3).run(worker):
        assert found == pytest.approx({"difference_rank1_share": 16 / 25, "difference_norm": 5.0})


def test_spectra_of_known_gradients():
    """One matrix of rank 1, and one of singular values 2, 1, 1, 1, 1; no vectors, and nothing missing or not finite."""
    model = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(3, 3)])
    model[0].weight.grad, model[0].bias.grad = torch.outer(torch.arange(5.0), torch.ones(5)), torch.ones(5)
    model[1].weight.grad = torch.diag(torch.tensor([2.0, 1.0, 1.0, 1.0, 1.0]))
    model[2].weight.grad = torch.full((3, 3), torch.nan)  # as of a step that a loss scaler skips
    (found,) = LocalWorld(1).run(lambda comm: gradient_spectra(model, {}, comm))
    assert found["gradient_rank1_share"] == pytest.approx((1 + 4 / 8) / 2)
    assert found["gradient_rank4_share"] == pytest.approx((1 + 7 / 8) / 2)
    assert found["gradient_stable_rank"] == pytest.approx((1 + 2) / 2)


def every_third(model, row, comm):
    """Values on each third step alone; all workers add up."""
    total = comm.all_reduce(torch.tensor([1.0])).wait().item()
    return {"step_squared": row["step"] ** 2, "workers_seen": total} if row["step"] % 3 == 0 else {}


def test_values_are_logged_between_rows_and_cut_off_with_the_steps_that_are_taken_again(tmp_path):
    config = replace(CONFIG, output=tmp_path, name="one", max_steps=7, log_every=5, epochs=5)
    folder = train(config, callbacks=[EachStep(every_third)])
    wanted = [{"step": step, "step_squared": step**2, "workers_seen": 2.0} for step in (3, 6)]
    info = folder / "info.jsonl"
    assert [json.loads(line) for line in info.read_text().splitlines()] == wanted
    assert not any("step_squared" in row for row in rows_of(folder))
    with info.open() as before:
        MetricsWriter(folder, done=5).close()  # a resumed run
        assert len(before.readlines()) == 2  # replaced as a whole: one that is killed meanwhile loses nothing
    assert [json.loads(line)["step"] for line in info.read_text().splitlines()] == [3]


def test_elastic_runs_refuse_callbacks_between_rows(tmp_path):
    with pytest.raises(ValueError, match="leave EachStep or elastic out"):
        train(replace(CONFIG, output=tmp_path, elastic=True), callbacks=[EachStep(every_third)])
