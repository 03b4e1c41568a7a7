"""The parts of a training run that need no processes: shares of data, schedule, configuration, records."""

from __future__ import annotations

import csv
import json
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from thinwire.clock import Clock
from thinwire.comm import LocalWorld
from thinwire.lab.report import read_run
from thinwire.lab.train import RunConfig, WorkerError, train
from thinwire.lab.train.data import Digits, Images, PlainText, Split, num_batches, shard, uneven_shard
from thinwire.lab.train.folder.run_folder import begin, held_folder, make_folder
from thinwire.lab.train.loss import Loss
from thinwire.lab.train.models import GPT, DigitsNet
from thinwire.lab.train.optimize import DGCSGD, SGD, Adam, LearningRateSchedule
from thinwire.lab.train.results.metrics_files import COLUMNS, MetricsWriter
from thinwire.lab.train.step.steps import course, steps


@pytest.mark.parametrize(("num_examples", "size"), [(12, 4), (13, 4), (1, 1), (3, 4)])
def test_shares_are_equal_disjoint_and_cover_all_but_a_remainder(num_examples, size):
    shares = [shard(num_examples, rank, size, seed=3, epoch=5) for rank in range(size)]
    assert {len(share) for share in shares} == {num_examples // size}
    seen = torch.cat(shares).tolist()
    assert len(set(seen)) == len(seen) == num_examples - num_examples % size
    assert set(seen) <= set(range(num_examples))


def test_the_order_changes_with_seed_and_epoch_alone():
    def order(seed: int, epoch: int) -> list[int]:
        return shard(100, 0, 1, seed, epoch).tolist()

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


@pytest.mark.parametrize(
    ("num_examples", "size", "shuffled"), [(100, 4, 0.0), (103, 4, 0.1), (100, 8, 1.0), (7, 3, 0.5)]
)
def test_uneven_shares_are_equal_disjoint_and_the_same_in_every_epoch(num_examples, size, shuffled):
    labels = torch.arange(num_examples) % 5
    epochs = [
        [uneven_shard(labels, rank, size, seed=3, epoch=epoch, shuffled=shuffled) for rank in range(size)]
        for epoch in range(2)
    ]
    assert {len(share) for share in epochs[0]} == {num_examples // size}
    assert len(set(torch.cat(epochs[0]).tolist())) == num_examples // size * size
    for first, second in zip(*epochs, strict=True):
        assert sorted(first.tolist()) == sorted(second.tolist())
        assert len(first) < 10 or first.tolist() != second.tolist()


def test_a_split_by_class_leaves_workers_few_classes_and_the_shuffled_part_all():
    labels = torch.arange(1000) % 10
    for rank in range(5):
        assert len(set(labels[uneven_shard(labels, rank, 5, seed=0, epoch=0)].tolist())) == 2
        mixed = labels[uneven_shard(labels, rank, 5, seed=0, epoch=0, shuffled=0.2)]
        counts = mixed.bincount(minlength=10)
        assert counts.max() >= 60
        assert 20 <= counts.sort().values[:8].sum() <= 45  # 8/10 of the 40 that are shuffled


def test_the_configuration_chooses_the_split():
    labels = torch.arange(40).flip(0) // 4
    config = RunConfig("digits", batch_size=10, epochs=1)

    def walk(comm, config):
        return (
            torch.cat([examples_of(step) for step in steps_of(config, numbered(labels), comm)]).sort().values.tolist()
        )

    by_class = LocalWorld(4).run(walk, replace(config, split="by-class"))
    by_position = LocalWorld(4).run(walk, replace(config, split="by-position"))
    assert [share[0] // 10 for share in by_position] == [0, 1, 2, 3]
    assert all(share == list(range(share[0], share[0] + 10)) for share in by_position)
    assert [sorted(set(labels[share].tolist())) for share in by_class] == [[0, 1, 2], [2, 3, 4], [5, 6, 7], [7, 8, 9]]
    assert LocalWorld(4).run(walk, config) == [shard(40, r, 4, 0, 0).sort().values.tolist() for r in range(4)]


def test_a_batch_that_is_larger_than_a_share_is_refused():
    with pytest.raises(ValueError, match="choose a batch_size of at most 25"):
        num_batches(100, size=4, batch_size=26)


def test_every_worker_takes_full_batches_and_the_last_step_ends_an_epoch():
    config = RunConfig("digits", epochs=3, batch_size=4, max_steps=5)

    def walk(comm):
        data = numbered(torch.zeros(20))
        return list(steps_of(config, data, comm))

    for taken in LocalWorld(2).run(walk):
        assert [step.number for step in taken] == [1, 2, 3, 4, 5]
        assert [step.ends_epoch for step in taken] == [False, True, False, True, True]
        assert all(len(examples_of(step)) == 4 for step in taken)


def test_steps_go_on_after_any_number_of_them_with_the_batches_that_come_next():
    config = RunConfig("digits", epochs=3, batch_size=2, accumulate=2)
    data = numbered(torch.zeros(30))

    def walk(comm, done):
        return [
            (step.number, step.ends_epoch, examples_of(step).tolist()) for step in steps_of(config, data, comm, done)
        ]

    whole = LocalWorld(2).run(walk, 0)
    assert [len(taken) for taken in whole] == [9, 9] and len(whole[0][0][2]) == 4
    for done in range(9):
        assert LocalWorld(2).run(walk, done) == [taken[done:] for taken in whole]


def steps_of(config, data, comm, done=0):
    return steps(config, data, comm, course(config, data, comm.size), done, Clock())


def numbered(labels):
    """Examples whose input is their number."""
    numbers = torch.arange(len(labels), dtype=torch.float32).view(-1, 1, 1, 1)
    return Images(Split(numbers, labels.long()), Split(numbers[:1], labels[:1].long()), num_classes=10)


def examples_of(step):
    return torch.cat([batch.inputs[0].flatten().long() for batch in step.batches])


def test_digits_are_split_alike_for_all_runs_and_standardised():
    training, test = Digits().splits()
    assert len(training.labels) + len(test.labels) == 1797
    assert training.inputs.shape[1:] == (1, 8, 8)
    assert training.inputs.mean().item() == pytest.approx(0, abs=1e-5)
    assert training.inputs.std().item() == pytest.approx(1, abs=1e-5)
    assert torch.equal(test.inputs, Digits().splits()[1].inputs)


def test_all_parameters_of_the_digits_network_are_matrices_or_kernels():
    model = DigitsNet(width=48).build()
    assert all(p.dim() >= 2 for p in model.parameters())
    assert sum(p.numel() for p in model.parameters()) == 90 * 48**2 + 169 * 48
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def test_the_learning_rate_rises_in_a_line_and_falls_as_a_cosine():
    sgd = SGD(learning_rate=0.4, schedule=LearningRateSchedule(warmup_fraction=0.25))
    rates = [sgd.learning_rate_at(step, 40) for step in range(40)]
    assert rates[:10] == pytest.approx([0.04 * (step + 1) for step in range(10)])
    assert rates[25] == pytest.approx(0.4 * (1 + math.cos(math.pi / 2)) / 2)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert all(rate > 0 for rate in rates)


@pytest.mark.parametrize("warmup_fraction", [0, 1])
@pytest.mark.parametrize("num_steps", [1, 2, 7])
def test_schedules_at_their_limits(warmup_fraction, num_steps):
    sgd = SGD(schedule=LearningRateSchedule(warmup_fraction=warmup_fraction))
    assert all(0 < sgd.learning_rate_at(step, num_steps) <= sgd.learning_rate for step in range(num_steps))


@pytest.mark.parametrize(
    "changes",
    [{"workers": 0}, {"epochs": 0}, {"seed": -1}, {"port": 70000}, {"name": "a/b"}, {"name": ".."}, {"max_steps": 0}]
    + [{"shuffled": 1.5}, {"shuffled": 0.1}, {"name": 256 * "x"}]
    + [{"data": PlainText(context=64), "model": GPT(context=32)}],
)
def test_a_wrong_field_is_named(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        replace(RunConfig("digits"), **changes)


def test_folders_of_our_own_naming_are_numbered_and_given_names_are_kept(tmp_path):
    config = RunConfig("digits", output=tmp_path)
    assert [make_folder(config).name for _ in range(3)] == [
        f"digits-gradients-mean-seed0{end}" for end in ("", "-2", "-3")
    ]
    named = replace(config, name="mine")
    with held_folder(named) as folder:
        (folder / "metrics.jsonl").write_text("a night of work")
    with pytest.raises(ValueError, match="--overwrite"):
        make_folder(named)
    (folder / "worker-1-error.txt").write_text("of another time")
    (tmp_path / "scratch").mkdir()
    (folder / "checkpoints").symlink_to(tmp_path / "scratch")
    again = replace(named, overwrite=True)
    assert make_folder(again) == folder and (folder / "metrics.jsonl").exists()
    assert not (folder / "worker-1-error.txt").exists()
    begin(again, folder)
    assert [path.name for path in folder.iterdir()] == ["config.json"] and (tmp_path / "scratch").exists()


def test_a_mistake_is_found_before_a_run_is_overwritten(tmp_path):
    config = RunConfig("digits", workers=2, max_steps=1, batch_size=8, name="mine", output=tmp_path)
    folder = train(config)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match="batch_size 5000 "):
        train(replace(config, batch_size=5000, overwrite=True))
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    train(replace(config, batch_size=16, overwrite=True))
    assert json.loads((folder / "config.json").read_text())["batch_size"] == 16


def test_overwrite_replaces_runs_alone(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    with pytest.raises(ValueError, match="not a run"):
        make_folder(RunConfig("digits", output=tmp_path, name="thesis", overwrite=True))
    assert (tmp_path / "thesis" / "chapter.txt").exists()


def test_a_row_can_be_read_at_once_and_a_loss_that_diverged_is_null(tmp_path):
    records = MetricsWriter(tmp_path)
    records.row({"step": 1, "loss": math.nan, "bytes_sent": 7})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": None, "bytes_sent": 7}
    with (tmp_path / "metrics.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert list(row) == COLUMNS
    assert (row["step"], row["bytes_sent"], row["test_loss"]) == ("1", "7", "")
    records.close()


def test_the_page_explains_every_column_of_a_row_in_their_order():
    page = (Path(__file__).parents[4] / "docs" / "training.md").read_text()
    table = page.partition("| column | what it holds |")[2].partition("\n\n")[0]
    names = [line.split("|")[1] for line in table.splitlines()[2:]]
    assert re.findall(r"`(\w+)`", "".join(names)) == COLUMNS


def test_a_folder_without_a_finished_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"summary\.json is missing"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"batch_size": 1000}, "^batch_size 1000 .* at most 629"),
        ({"strategy": "Gradients(dgc(0.01))"}, "^SGD has momentum 0.9 of its own, .* --optimizer.momentum 0$"),
        (
            {"strategy": "Gradients(dgc(0.01))", "optimizer": Adam()},
            "^AdamW has momentum 0.9 of its own, .* on the command line --optimizer.kind DGCSGD$",
        ),
        (
            {"optimizer": DGCSGD()},
            r"^DGCSGD leaves momentum to the averager, and Mean\(\) has none; .* --optimizer.kind SGD",
        ),
        ({"strategy": "Gossip(Mix(Torus(rows=3)))"}, "^Torus.*rows"),
    ],
)
def test_a_mistake_that_all_workers_find_is_told_once(changes, expected, tmp_path):
    with pytest.raises(ValueError, match=expected) as error:
        train(replace(RunConfig("digits", workers=2, output=tmp_path), **changes))
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir()), "the name is free again"


class Mislabelled(Digits):
    def load(self):
        raise ValueError("labels are wrong")


@dataclass(frozen=True)
class BrokenLoss(Loss):
    """Wrong in the third step: a program's fault, not the user's."""

    steps: ClassVar[list[None]] = []

    def __call__(self, scores, labels):
        self.steps.append(None)
        if len(self.steps) == 3:
            raise RuntimeError("a bug\nin two lines")  # the line that is named
        return scores.sum()


LINE = next(i for i, line in enumerate(Path(__file__).read_text().splitlines(), 1) if "# the line that is" in line)


def test_a_worker_that_fails_is_named_with_its_reason_and_the_line_of_the_user_s_code_that_raised(tmp_path):
    with pytest.raises(WorkerError) as error:
        train(RunConfig("digits", loss=BrokenLoss(), workers=2, output=tmp_path))
    place = rf"in \S*test_train.py:{LINE} \(traceback in \S*/worker-\1-error.txt\)"
    assert re.fullmatch(rf"worker ([01]) failed: RuntimeError: a bug in two lines, {place}", str(error.value))
    with pytest.raises(ValueError, match=r"^labels are wrong, in \S*test_train.py:\d+$"):  # there is no traceback of it
        train(RunConfig("digits", data=Mislabelled(), workers=2, output=tmp_path))


def test_one_worker_sends_nothing(tmp_path):
    folder = train(RunConfig("digits", workers=1, max_steps=2, output=tmp_path))
    summary = read_run(folder).summary
    assert summary["bytes_sent_per_worker"] == 0
    assert summary["compression_vs_fp32"] is None


def test_late_gradients_are_refused_before_anything_starts(tmp_path):
    with pytest.raises(
        ValueError, match=r"Gossip: Mean\(\) replaces parameters, and overlap needs an averager that adds"
    ):
        train(RunConfig("digits", "Gossip(Mean(), overlap=True)", workers=2, output=tmp_path))
    assert not list(tmp_path.iterdir())


def test_the_learning_rate_grows_with_the_workers_where_asked(tmp_path):
    config = RunConfig("digits", workers=2, batch_size=64, max_steps=2, log_every=1, output=tmp_path)
    schedule = replace(config.optimizer.schedule, scale_by_workers=True, warmup_fraction=0.0, shape="constant")
    folder = train(replace(config, optimizer=replace(config.optimizer, schedule=schedule)))
    assert [row["learning_rate"] for row in read_run(folder).rows] == [2 * config.optimizer.learning_rate] * 2


def test_a_run_tells_variance_and_levels_where_asked_and_is_the_same_run(tmp_path):
    config = RunConfig(
        "digits", "Gradients(Mean(ALQ(bits=3)))", workers=2, batch_size=64, max_steps=4, log_every=2, output=tmp_path
    )
    silent, telling = (read_run(train(replace(config, variance=variance))).rows for variance in (False, True))
    assert [row["loss"] for row in silent] == [row["loss"] for row in telling]
    assert [row["bytes_sent"] for row in silent] == [row["bytes_sent"] for row in telling]
    assert not any("variance" in row for row in silent)
    assert all(0 < row["variance"] < 10 and len(row["levels"]) == 8 for row in telling)


def test_workers_without_rounds_train_too(tmp_path):
    folder = train(
        RunConfig("digits", strategy="Asynchronous()", workers=2, batch_size=64, max_steps=8, output=tmp_path)
    )
    final = read_run(folder).summary["final"]
    assert final["steps"] == 8 and final["consensus_distance"] > 0
    state = torch.load(folder / "checkpoints" / "step-000008" / "worker-1.pt", weights_only=True)
    assert {"averager", "model", "optimizer"} <= state.keys()
    with pytest.raises(ValueError, match=r"got Pairwise\(\); Pairwise\(\) goes into Asynchronous"):
        train(RunConfig("digits", strategy="Gossip(Pairwise())", workers=2, output=tmp_path))


def test_where_models_differ_the_run_says_how_far_and_keeps_each(tmp_path):
    strategy = "Gossip(PushSum(DirectedRing()), overlap=True, staleness=1)"
    config = RunConfig("digits", strategy, workers=3, batch_size=64, output=tmp_path)
    config = replace(config, split="by-class", shuffled=0.1, max_steps=8, log_every=3)
    folder = train(config)
    run = read_run(folder)
    assert [row["step"] for row in run.rows] == [3, 6, 8]
    assert all(row["consensus_distance"] > 0 for row in run.rows)
    final = run.summary["final"]
    last = run.rows[-1]
    for key in ("test_accuracy", "mean_model_test_accuracy", "mean_model_test_loss", "consensus_distance"):
        assert final[key] == last[key]

    checkpoint = folder / "checkpoints" / "step-000008"
    workers = [torch.load(checkpoint / f"worker-{rank}.pt", weights_only=True) for rank in range(3)]
    shared = torch.load(checkpoint / "shared.pt", weights_only=True)
    for name, mean in shared["model"].items():
        models = torch.stack([worker["model"][name] for worker in workers])
        assert not torch.equal(models[0], models[1])
        torch.testing.assert_close(models.mean(0), mean, rtol=0, atol=1e-6)
    steps = [worker["averager"][f"rank{rank}"]["averager"]["progress"]["step"] for rank, worker in enumerate(workers)]
    assert steps == [4, 4, 4]  # one in every second step
    assert all(worker["optimizer"]["state"] for worker in workers)
    # What crossed the wire: the weights of each broadcast to begin with, and 4 rounds of x and w.
    parameters = sum(t.numel() for t in shared["model"].values())
    assert 4 * (4 * parameters + 8) <= last["bytes_sent"] <= 5 * 4 * parameters + 4096

    model, (_, test) = DigitsNet().build(), Digits().splits()
    accuracies = []
    for state in [*(worker["model"] for worker in workers), shared["model"]]:
        model.load_state_dict(state)
        with torch.no_grad():
            accuracies.append((model(test.inputs).argmax(1) == test.labels).double().mean().item())
    assert sum(accuracies[:3]) / 3 == pytest.approx(final["test_accuracy"], abs=1e-9)
    assert accuracies[3] == pytest.approx(final["mean_model_test_accuracy"], abs=1e-9)
