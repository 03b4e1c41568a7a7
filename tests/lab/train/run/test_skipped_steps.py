"""Steps with a NaN gradient in a real run: they are skipped, counted and reported, and too many in a row end the run."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path

import pytest
import torch
from helpers.command import python

from thinwire.comm import LocalWorld
from thinwire.lab.report import read_run
from thinwire.lab.report.captioned_figures import captioned_figures
from thinwire.lab.report.groups import grouped
from thinwire.lab.report.metrics import main_metric
from thinwire.lab.report.runs import find
from thinwire.lab.report.tables import summary_table
from thinwire.lab.train import RunConfig
from thinwire.lab.train.data import Batch
from thinwire.lab.train.step.training import Training

STRATEGIES = [
    "Gradients(Mean(TopK(0.1), ErrorFeedback()), max_nonfinite=3)",
    "Gossip(Mix(Complete()), max_nonfinite=3)",
    "Asynchronous(max_nonfinite=3)",
]
PROGRAM = '''
import sys
from pathlib import Path

import torch
from thinwire.lab.cli.train import trained
from thinwire.lab.train import RunConfig
from thinwire.lab.train.data import Digits, Images


class Spoilt(Images):
    """Some batches of worker 1 are NaN; which ones is in `spoilt`."""

    def batches(self, plan, seed, rank, epoch, numbers):
        for i, batch in zip(numbers, super().batches(plan, seed, rank, epoch, numbers)):
            if rank == 1 and i in self.spoilt:
                batch.inputs[0].fill_(float("nan"))
            yield batch


class SpoiltDigits(Digits):
    def load(self):
        images = Spoilt(*self.splits(), num_classes=10)
        images.spoilt = range(*map(int, sys.argv[3].split(":")))
        return images


if __name__ == "__main__":
    trained(
        RunConfig(
            "digits", strategy=sys.argv[1], data=SpoiltDigits(), workers=2, batch_size=64, max_steps=6, log_every=1,
            variance=sys.argv[1].startswith("Gradients"), output=Path(sys.argv[2]), name="run",
        )
    )
'''


def run(folder: Path, strategy: str, spoilt: str) -> subprocess.CompletedProcess:
    """Train in processes of its own, with NaN in these batches of worker 1 ("2:4": from 2, before 4)."""
    program = folder / "spoilt_run.py"
    program.write_text(PROGRAM)
    return python(program, strategy, folder, spoilt, cwd=folder)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_bad_batch_on_one_worker_costs_one_step(strategy, tmp_path):
    done = run(tmp_path, strategy, "2:3")
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("thinwire: by step 3, 1 update was skipped because a gradient was infinite or NaN"), line

    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["skipped_steps"] for row in rows] == [0, 0, 1, 1, 1, 1]
    assert [row["loss"] is None for row in rows] == [False, False, True, False, False, False]
    summary = read_run(tmp_path / "run").summary
    assert summary["skipped_steps"] == 1
    assert all(math.isfinite(value) for key, value in summary["final"].items() if key != "train_loss")

    assert "1 update skipped" in done.stdout
    assert summary_table([read_run(tmp_path / "run")], "runs").row_count == 1
    found = find([tmp_path / "run"])
    drawings = captioned_figures(grouped(found.runs), main_metric(found.runs, None), {})
    figures = {drawing.name: drawing.figure for drawing in drawings if drawing.figure is not None}
    assert figures.keys() >= {"loss", "step-time"}
    figures["loss"].canvas.draw()


@pytest.mark.parametrize(
    ("strategy", "first"),
    [(STRATEGIES[0], "9.weight"), (STRATEGIES[1], "0.weight")],  # buckets of gradients come from the last layer on
)
def test_too_many_bad_batches_in_a_row_end_the_run(strategy, first, tmp_path):
    done = run(tmp_path, strategy, "1:9")
    assert done.returncode == 1
    *warning, line = done.stderr.splitlines()
    assert [text.startswith("thinwire: by step 2, 1 update was skipped") for text in warning] == [True]
    assert f"3 steps in a row were not finite; first on rank 1, parameter '{first}'" in line and "failed" not in line


@pytest.mark.filterwarnings("ignore:Gradients. a step was not finite:RuntimeWarning")
def test_a_skipped_step_leaves_running_statistics_and_recurrent_state_finite():
    def worker(comm):
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = RunConfig("digits", workers=2)
        strategy = config.parsed_strategy().attach(model, optimizer, comm=comm)
        training = Training(config, model, model, optimizer, torch.amp.GradScaler(enabled=False), strategy)
        labels = torch.tensor([0, 1, 2, 0])
        training.step([Batch((torch.randn(4, 2),), labels)])
        before = [b.clone() for b in model.buffers()]
        spoilt = torch.full((4, 2), math.nan) if comm.rank else torch.randn(4, 2)
        training.step([Batch((spoilt,), labels)])
        kept = [torch.equal(b, a) for b, a in zip(model.buffers(), before, strict=True)]
        skipped = strategy.num_skipped
        strategy.detach()
        return skipped, kept, all(b.isfinite().all().item() for b in model.buffers())

    alone, spoilt = LocalWorld(2).run(worker)
    assert alone == (1, [False, False, False], True), "its own batch was good"
    assert spoilt == (1, [True, True, False], True), "the number of batches counts on"
