"""What a step does, and what the loop makes of it: accumulation, precision, clipping, compilation, tests, logging."""

from __future__ import annotations

import copy
import json
import logging
import math
import shutil
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from helpers import tiny
from helpers.interruptions import NEVER
from helpers.program import wait_until
from helpers.spawn import spawn
from torch import nn

import thinwire as tw
from thinwire.comm import ProcessGroupCommunicator
from thinwire.lab.train import RunConfig, train
from thinwire.lab.train.data import Batch, ImageFolder
from thinwire.lab.train.device import choose_device
from thinwire.lab.train.loss import CrossEntropy
from thinwire.lab.train.models import CIFARResNet, DigitsNet, LSTMLanguageModel, Model, Transformer
from thinwire.lab.train.optimize import SGD, LearningRateSchedule
from thinwire.lab.train.results.evaluation import evaluate, models_apart
from thinwire.lab.train.results.trackers import SILENT_SECONDS, MLflow, Tracker, WandB, check_installed, trackers
from thinwire.lab.train.run import loop
from thinwire.lab.train.start.watch import LAST_SECONDS, STOP_SECONDS
from thinwire.lab.train.step.training import Training, check_optimizer, prepare
from thinwire.strategy.model.mean_model import SKETCH_SIZE

PLAIN = SGD(0.1, weight_decay=0.0, momentum=0.0, schedule=LearningRateSchedule(warmup_fraction=0.0, shape="constant"))
CONFIG = RunConfig("digits", workers=1, batch_size=64, epochs=1, log_every=1, model=DigitsNet(width=4), optimizer=PLAIN)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """This process as the only worker."""
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", f"file://{store}", world_size=1, rank=0)
    with ProcessGroupCommunicator() as comm:
        yield comm
    dist.destroy_process_group()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def train_by_gossip(comm, folder: Path) -> int:
    """Two epochs, each with a row, a test and a checkpoint; the bytes of all-reduces for these."""
    loop.run(
        replace(CONFIG, strategy="Gossip(Mix(Ring()))", epochs=2, log_every=1000, model=DigitsNet()),
        folder,
        comm,
        NEVER,
    )
    return comm.ledger.collectives["all_reduce"].bytes_sent


def test_a_test_and_the_checkpoint_after_it_compute_the_mean_model_once(tmp_path, cache):
    sent = spawn(3, train_by_gossip, tmp_path)
    parameters = sum(p.numel() for p in DigitsNet().build().parameters())
    of_an_epoch = 4 / 3 * (8 * SKETCH_SIZE + 4 * parameters)
    assert all(2 * of_an_epoch < num_bytes < 2.1 * of_an_epoch for num_bytes in sent)


def run_alone(config: RunConfig, folder: Path, comm) -> tuple[list[dict], dict]:
    folder.mkdir()
    loop.run(config, folder, comm, NEVER)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return rows, json.loads((folder / "summary.json").read_text())


def train_apart(comm, folder: Path, strategy: str) -> list[str]:
    """Two epochs with a codec that decodes other values on each worker; what is logged of it."""

    @tw.notation.register
    @dataclass(frozen=True, repr=False)
    class OwnSigns(tw.codec.Codec):
        traits = tw.codec.Traits(unbiased=True)  # else a warning asks for a memory

        def encode_segments(self, segments, keys, residuals):
            return torch.zeros(0, dtype=torch.uint8)

        def decode_add_segments(self, payload, outs, weight, keys):
            for out in outs:
                out += weight * (1 + comm.rank)

        def segments_nbytes(self, numels):
            return 0

    said: list[str] = []
    logger = logging.getLogger("thinwire")
    logger.addHandler(Mock(level=0, handle=lambda record: said.append(record.getMessage())))
    loop.run(replace(CONFIG, strategy=strategy, epochs=2), folder, comm, NEVER)
    return [text for text in said if "not equal" in text]


@pytest.mark.parametrize(
    ("strategy", "number"), [("Gradients(Mean(OwnSigns()))", 1), ("Gradients(Mean(QSGD(bits=4)))", 0)]
)
def test_a_run_says_once_that_models_differ_which_should_be_equal(tmp_path, cache, strategy, number):
    """A test is shared out among the workers, as if all of them had one model."""
    first, second = spawn(2, train_apart, tmp_path, strategy)
    assert len(first) == number and not second
    for text in first:
        assert f"although {strategy} gives all of them the same gradients: '0.weight' and 3 more, which are " in text


@pytest.mark.parametrize("difference", [0.0, 0.5])
def test_how_far_models_are_apart(difference):
    """One parameter of (3, 4) +- d/2: each worker is d/2 from a mean of length 5."""

    def worker(comm):
        model = nn.Linear(2, 1)
        with torch.no_grad():
            model.weight.copy_(torch.tensor([[3.0, 4.0 + (comm.rank - 0.5) * difference]]))
            model.bias.zero_()
        return models_apart(model, comm)

    expected = (
        f"'weight', which are {difference / 2 / 5:.2g} of their length away from their mean" if difference else None
    )
    assert tw.LocalWorld(2).run(worker) == [expected] * 2


def batches(num: int, size: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(num * size, 1, 8, 8, generator=generator)
    labels = torch.randint(10, (num * size,), generator=generator)
    return [Batch((x,), y) for x, y in zip(inputs.split(size), labels.split(size), strict=True)]


def weights(training: Training) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in training.model.parameters()])


# Steps


def test_accumulated_gradients_are_those_of_one_large_batch_and_are_averaged_once(alone):
    data, parts = CONFIG.data.load(), batches(3, 20)
    whole = [Batch((torch.cat([part.inputs[0] for part in parts]),), torch.cat([part.labels for part in parts]))]
    trainings = [prepare(CONFIG, data, CPU) for _ in range(2)]
    before = weights(trainings[0])
    for training, given in zip(trainings, (parts, whole), strict=True):
        training.step(given)
    assert (weights(trainings[1]) - before).norm() > 1e-3
    torch.testing.assert_close(weights(trainings[0]), weights(trainings[1]), rtol=0, atol=1e-7)
    for training in trainings:
        assert training.strategy.ledger.dense_numel == len(before)
        training.strategy.detach()


@pytest.mark.parametrize(
    "strategy",
    [
        "Local(Mean(QSGD(bits=4)), every=2)",
        "Gossip(Mix())",
        "Gradients(Mean())",
        "Gradients(PowerSGD())",
        "Gradients(Mean(SignSGD(scale=0.1)))",
    ],
)
def test_a_run_says_that_it_records_no_variance(alone, cache, tmp_path, strategy, capfd):
    run_alone(replace(CONFIG, strategy=strategy, variance=True, max_steps=1), tmp_path / "run", alone)
    assert f"--variance records nothing: {strategy} does not average gradients by a lossy" in capfd.readouterr().err


def test_rows_have_the_loss_without_label_smoothing(alone, cache, tmp_path):
    config = replace(CONFIG, optimizer=replace(PLAIN, learning_rate=1e-12), max_steps=1)  # the weights stay as they are
    smoothed = replace(config, loss=CrossEntropy(label_smoothing=0.3))
    (plain,), (row,) = (run_alone(c, tmp_path / str(i), alone)[0] for i, c in enumerate((config, smoothed)))
    assert [row[name] for name in ("loss", "test_loss")] == [plain[name] for name in ("loss", "test_loss")]


def test_a_run_that_records_variance_says_nothing_of_it(alone, cache, tmp_path, capfd):
    config = replace(CONFIG, strategy="Gradients(Mean(QSGD(bits=4)))", variance=True, max_steps=1)
    rows, _ = run_alone(config, tmp_path / "run", alone)
    assert "variance" in rows[-1] and "records nothing" not in capfd.readouterr().err


@pytest.mark.parametrize("clip_norm", [0.1, 1e6])
def test_a_step_follows_the_gradient_shortened_to_the_largest_norm(clip_norm, alone):
    (batch,) = batches(1, 50)
    training = prepare(replace(CONFIG, clip_norm=clip_norm), CONFIG.data.load(), CPU)
    copied = copy.deepcopy(training.model)
    nn.functional.cross_entropy(copied(*batch.inputs), batch.labels).backward()
    gradient = torch.cat([p.grad.flatten() for p in copied.parameters()])
    before = weights(training)
    training.step([batch])
    expected = before - PLAIN.learning_rate * gradient * min(1.0, clip_norm / gradient.norm().item())
    torch.testing.assert_close(weights(training), expected, rtol=1e-5, atol=1e-7)
    training.strategy.detach()


def test_clipping_after_momentum_was_added_up_is_refused():
    late = replace(CONFIG, strategy="Gradients(Mean(TopK(0.1), MomentumCorrection(0.9)))", clip_norm=1.0)
    with pytest.raises(ValueError, match=r"clip_norm 1.0 would clip .* clip there: Mean\(\.\.\., clip=ClipByNorm"):
        check_optimizer(late)
    check_optimizer(replace(late, strategy="Gradients(Mean(TopK(0.1), ErrorFeedback()))"))
    check_optimizer(replace(late, clip_norm=None))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precision_learns_nearly_the_same_with_weights_in_fp32(precision, tmp_path, alone):
    exact, _ = run_alone(replace(CONFIG, max_steps=8), tmp_path / "fp32", alone)
    rows, _ = run_alone(replace(CONFIG, max_steps=8, precision=precision), tmp_path / precision, alone)
    losses, others = ([row["loss"] for row in each] for each in (exact, rows))
    assert losses != others and others == pytest.approx(losses, rel=0.02)
    saved = torch.load(tmp_path / precision / "checkpoints" / "best" / "shared.pt", weights_only=True)
    assert all(tensor.dtype == torch.float32 for tensor in saved["model"].values())
    own = torch.load(tmp_path / precision / "checkpoints" / "best" / "worker-0.pt", weights_only=True)
    assert bool(own["scaler"]) == (precision == "fp16")


def test_a_loss_scaler_skips_the_step_that_overflows_and_goes_on(alone):
    training = prepare(replace(CONFIG, precision="fp16"), CONFIG.data.load(), CPU)
    training.scaler.load_state_dict(training.scaler.state_dict() | {"scale": 2.0**40})
    before, (batch,) = weights(training), batches(1, 20)
    training.step([batch])
    assert torch.equal(weights(training), before)
    for _ in range(30):
        training.step([batch])
    assert training.scaler.get_scale() < 2.0**40 and not torch.equal(weights(training), before)
    assert weights(training).isfinite().all()
    training.strategy.detach()


@dataclass(frozen=True)
class Perceptron(Model):
    """Few kernels, as each takes a second of the C++ compiler."""

    def build(self, num_classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, num_classes))


def test_a_compiled_model_has_the_same_losses_but_for_rounding(tmp_path, alone):
    from torch._inductor import config as inductor  # an import that the other tests need not wait for

    # The test in one batch: one shape less to compile.
    config = replace(CONFIG, model=Perceptron(), max_steps=2, test_batch_size=600)
    eager, _ = run_alone(config, tmp_path / "eager", alone)
    # Helper processes would import PyTorch first, and a few kernels take less time than the search for vector instructions.
    with inductor.patch({"compile_threads": 1, "cpp.vec_isa_ok": False}):
        rows, _ = run_alone(replace(config, compile=True), tmp_path / "compiled", alone)
    for key in ("loss", "test_loss"):
        assert rows[-1][key] == pytest.approx(eager[-1][key], rel=1e-5)
    assert len(rows) == 2


def test_a_gpu_that_is_not_there_is_one_line(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ValueError, match="device 'cuda' was asked for, but PyTorch finds no GPU"):
        choose_device(replace(CONFIG, device="cuda"))
    with pytest.raises(ValueError, match="finds no GPU"):
        train(replace(CONFIG, workers=2, device="cuda", output=tmp_path))
    assert not list(tmp_path.iterdir())


# Tests


def test_tests_come_every_few_epochs_and_at_the_end(tmp_path, alone):
    rows, _ = run_alone(replace(CONFIG, batch_size=400, epochs=5, evaluate_every=2), tmp_path / "run", alone)
    assert [row["epoch"] for row in rows if "test_accuracy" in row] == [2, 4, 5]


def test_text_has_its_perplexity_in_every_row_and_in_the_summary(tmp_path, alone):
    text = tiny.text(tmp_path / "text", context=5)
    config = replace(CONFIG, data=text, model=LSTMLanguageModel(width=8, layers=1), batch_size=10, max_steps=5)
    rows, summary = run_alone(config, tmp_path / "run", alone)
    for row in rows:
        assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))
    assert summary["metric"] == "test_perplexity"
    assert summary["final"]["test_perplexity"] == pytest.approx(math.exp(rows[-1]["test_loss"]))


def tasks(folder: Path) -> dict[str, RunConfig]:
    """A data set of each kind with a model for it."""
    text = tiny.text(folder / "text", context=5)
    tiny.images(folder / "images")
    files = ImageFolder(folder / "images", test="test", sizes=((0, 16),), test_size=16, num_loaders=0)
    return {
        "accuracy": replace(CONFIG, test_batch_size=50),
        "top5_accuracy": replace(CONFIG, data=files, model=CIFARResNet(depth=8), test_batch_size=3),
        "perplexity": replace(CONFIG, data=text, model=LSTMLanguageModel(width=8, layers=1), test_batch_size=2),
        "bleu": replace(
            CONFIG, data=tiny.pairs(folder / "pairs"), model=Transformer(1, 16, 2, 16, 0.0), test_batch_size=4
        ),
    }


def evaluated_everywhere(comm, configs: dict[str, RunConfig]) -> list[tuple]:
    """On every worker: for each task what workers find together, and what one finds by itself."""
    found = []
    for name, config in configs.items():
        for text in ("Gradients(Mean())", "Gossip(Mix(Ring()))"):
            config, data = replace(config, strategy=text, workers=comm.size), config.data.load()
            torch.manual_seed(3)
            model = config.model.build(data.num_classes)
            optimizer = config.optimizer.build(model)
            strategy = config.parsed_strategy().attach(model, optimizer, seed=config.seed)
            if strategy.models_differ:
                with torch.no_grad():
                    for p in model.parameters():
                        p.add_(0.3 * comm.rank * torch.randn_like(p) * p.std())
            before = copy.deepcopy(model.state_dict())
            together = evaluate(config, data, model, strategy, comm)
            assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
            # A recurrent model reads as many streams side by side as all workers together.
            streams = config.test_batch_size * (1 if strategy.models_differ else comm.size)
            by_itself = {"test_": data.metrics(data.evaluate(model, 0, 1, streams))}
            if strategy.models_differ:
                for key, value in before.items():
                    if value.is_floating_point():
                        mean = comm.all_reduce(value.double()).wait() / comm.size
                        model.state_dict()[key].copy_(mean)
                whole = data.evaluate(model, 0, 1, comm.size * config.test_batch_size)
                by_itself["mean_model_test_"] = data.metrics(whole)
            found.append((name, strategy.models_differ, together, by_itself))
            strategy.detach()
    return found


def test_what_workers_find_together_is_what_one_finds_alone(tmp_path, cache):
    results = spawn(3, evaluated_everywhere, tasks(tmp_path), timeout_seconds=200)
    for found in zip(*results, strict=True):
        name, models_differ, together, _ = found[0]
        assert all(each[2] == together for each in found), name
        own = [each[3]["test_"] for each in found]
        assert name in own[0]
        for metric, value in own[0].items():
            if not models_differ:
                assert together[f"test_{metric}"] == pytest.approx(value, rel=1e-5), (name, metric)
                continue
            if metric in ("loss", "accuracy", "top5_accuracy"):
                mean = sum(each[metric] for each in own) / len(own)
                assert together[f"test_{metric}"] == pytest.approx(mean, rel=1e-5), (name, metric)
            of_mean = found[0][3]["mean_model_test_"][metric]
            assert together[f"mean_model_test_{metric}"] == pytest.approx(of_mean, rel=1e-4), (name, metric)
        if models_differ:
            assert len({each["loss"] for each in own}) == 3


# Weights & Biases


class Project:
    """Stands in for the package: remembers what it was told."""

    def __init__(self):
        self.begun, self.rows, self.id, self.is_finished = [], [], "xyz123", False

    def init(self, **options):
        self.begun.append(options)
        return self

    def log(self, row, step):
        self.rows.append((step, row))

    def finish(self):
        self.is_finished = True


def test_rows_go_to_weights_and_biases_where_asked_and_a_run_goes_on_there(tmp_path, monkeypatch, alone):
    package = Project()
    monkeypatch.setitem(sys.modules, "wandb", package)
    config = replace(CONFIG, max_steps=3, wandb="wires")
    check_installed(config)
    rows, _ = run_alone(config, tmp_path / "mine", alone)
    assert package.rows == [(row["step"], row) for row in rows] and package.is_finished
    first = package.begun[0]
    assert (first["project"], first["name"], first["dir"]) == ("wires", "mine", str(tmp_path / "mine"))
    assert first["config"] == config.as_dict() and "id" not in first
    WandB(config, tmp_path / "mine").row({"step": 4, "loss": math.nan})
    assert package.begun[1]["id"] == "xyz123" and package.begun[1]["resume"] == "allow"
    assert package.rows[-1] == (4, {"step": 4, "loss": None})


def test_rows_go_to_mlflow_where_asked_and_a_run_goes_on_there(tmp_path, monkeypatch, alone):
    """Of the package itself, with a folder in place of a server."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "tracked").as_uri())
    mlflow = pytest.importorskip("mlflow")
    config = replace(CONFIG, max_steps=3, mlflow="wires")
    rows, _ = run_alone(config, tmp_path / "mine", alone)
    again = MLflow(config, tmp_path / "mine")
    again.row({"step": 4, "loss": math.nan, "accuracy": 0.5, "levels": [-1.0, 1.0]})
    again.row({"step": 4, "loss": 0.25})  # as at the end of an epoch with a quorum
    again.close()
    resumed = MLflow(config, tmp_path / "mine")
    for step in (3, 4, 5):
        resumed.row({"step": step, "loss": 0.125, "resumed": 1.0})
    client = mlflow.MlflowClient()
    resumed.close()
    (kept,) = client.search_runs([client.get_experiment_by_name("wires").experiment_id])
    assert (kept.info.run_name, kept.info.status) == ("mine", "FINISHED")
    assert kept.data.params["strategy"] == config.strategy and kept.data.params["data.kind"] == "Digits"
    for name in ("loss", "bytes_sent", "learning_rate"):
        history = [(metric.step, metric.value) for metric in client.get_metric_history(kept.info.run_id, name)]
        expected = [(row["step"], pytest.approx(row[name])) for row in rows]
        assert history == expected + [(4, 0.25), (5, 0.125)] * (name == "loss")
    assert [metric.step for metric in client.get_metric_history(kept.info.run_id, "resumed")] == [5]
    assert kept.data.metrics["accuracy"] == 0.5 and "levels" not in kept.data.metrics


def test_a_run_goes_on_where_mlflow_is_gone(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "tracked").as_uri())
    pytest.importorskip("mlflow")
    MLflow(config := replace(CONFIG, mlflow="wires"), tmp_path).row({"step": 1, "loss": 0.5})
    shutil.rmtree(tmp_path / "tracked")
    (tracker,) = trackers(config, tmp_path)
    for step in (2, 3):
        tracker.row({"step": step, "loss": 0.25})
    tracker.close()
    (line,) = caplog.messages
    assert line.startswith("MLflow has not taken all rows: ") and line.endswith("; metrics.jsonl has them")


def test_a_worker_has_given_up_a_tracker_before_it_is_killed():
    assert SILENT_SECONDS <= min(STOP_SECONDS, LAST_SECONDS) / 2


def test_a_server_that_never_answers_holds_up_nothing(monkeypatch, caplog):
    monkeypatch.setattr("thinwire.lab.train.results.trackers.SILENT_SECONDS", 0.05)
    answer = threading.Event()
    tracker = Tracker("MLflow", lambda: answer.wait() and Mock())
    tracker.row({"step": 1})
    tracker.close()
    assert caplog.messages == [
        "MLflow has not taken all rows: it has not answered for 0.05 seconds; metrics.jsonl has them"
    ]
    answer.set()


def test_the_end_of_a_run_waits_as_long_as_a_server_takes_rows(monkeypatch, caplog):
    taken, turns, limits = [], threading.Semaphore(0), []

    class Slow:
        """Takes one row in each time limit."""

        def row(self, values):
            turns.acquire()
            taken.append(values["step"])

        def close(self):
            taken.append("closed")

    def limit_passes(seconds):
        limits.append(seconds)
        before = len(taken)
        turns.release()
        wait_until(
            lambda: not is_alive() or (len(taken) > before and tracker._rows.qsize() <= max(0, 10 - len(taken))),
            "a row",
        )

    tracker = Tracker("MLflow", Slow)
    is_alive = tracker._thread.is_alive
    monkeypatch.setattr(tracker, "_thread", Mock(is_alive=is_alive, join=limit_passes))
    for step in range(10):
        tracker.row({"step": step})
    tracker.close()
    assert taken == [*range(10), "closed"] and not caplog.messages
    assert limits == [SILENT_SECONDS] * len(limits) and len(limits) >= 10


def test_a_tracker_that_cannot_begin_ends_no_run(tmp_path, monkeypatch, alone, capfd):
    package = Project()
    package.init = lambda **options: 1 / 0
    monkeypatch.setitem(sys.modules, "wandb", package)
    rows, _ = run_alone(replace(CONFIG, max_steps=3, wandb="wires"), tmp_path / "mine", alone)
    assert len(rows) == 3
    assert "Weights & Biases has not taken all rows: division by zero; metrics" in capfd.readouterr().err


def test_a_change_of_workers_leaves_trackers_open(tmp_path, monkeypatch, alone):
    package = Project()
    monkeypatch.setitem(sys.modules, "wandb", package)
    monkeypatch.setattr(loop.Workers, "synchronize", lambda workers, state: state.done == 2)
    rows, _ = run_alone(replace(CONFIG, max_steps=3, wandb="wires"), tmp_path / "mine", alone)
    assert len(package.begun) == 1 and [step for step, _ in package.rows] == [row["step"] for row in rows] == [1, 2, 3]


def test_a_missing_package_is_one_line_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="wandb 'wires' needs a package .* pip install wandb"):
        train(replace(CONFIG, wandb="wires", output=tmp_path))
    assert not list(tmp_path.iterdir())
