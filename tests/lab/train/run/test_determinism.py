"""Two runs of one configuration have the same bits, however busy the machine is.

Each strategy and each kind of data set, in pairs, twice on two workers: once undisturbed, and once while another process
uses the cores and a thread of each worker fills freed memory with 7e18. Rows of metrics (but for times), weights and
checkpoints must be equal bit by bit. The second pass takes the runs in reverse order, so that each one inherits other memory.

`Asynchronous` is not among the strategies: which neighbour answers first decides what is averaged, so its
runs differ by nature.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from determinism import background_load, differences, dirty_memory, read_rows, unfinite
from helpers import tiny
from helpers.interruptions import NEVER
from helpers.spawn import spawn

from thinwire.clock import Clock
from thinwire.comm import Communicator
from thinwire.lab.files import write_json
from thinwire.lab.train import RunConfig
from thinwire.lab.train.data import Augmentation, ImageFolder
from thinwire.lab.train.models import CIFARResNet, LSTMLanguageModel, Transformer
from thinwire.lab.train.optimize import SGD, LearningRateSchedule
from thinwire.lab.train.run import loop
from thinwire.lab.train.step.steps import course, steps
from thinwire.lab.train.step.training import Training, random_state

SPARSE = "Mean(chain(TopK(0.05), QSGD(bits=4)), ErrorFeedback())"
STRATEGIES = {
    "gradients": f"Gradients({SPARSE})",
    "gradients-adaptive": "Gradients(Mean(ALQ(bits=3, update_steps=(1, 2))))",
    "gossip": "Gossip(Choco(Ring(), TopK(0.1), step_size=0.5))",
    "gossip-overlap": "Gossip(PushSum(Exponential()), overlap=True, staleness=1)",
    "local-updates": f"Local({SPARSE}, every=2)",
}
KINDS = ("memory-images", "folder-images", "text", "translation")
PAIRS = [*zip(STRATEGIES, (*KINDS, "memory-images"), strict=True)]


def tasks(folder: Path) -> dict[str, RunConfig]:
    """A data set of each kind, with a small model that has dropout or augmentation; four steps in two epochs."""
    optimizer = SGD(0.05, schedule=LearningRateSchedule(warmup_fraction=0.0, shape="constant"))
    config = RunConfig("test", workers=2, batch_size=4, epochs=2, max_steps=4, log_every=1, optimizer=optimizer)
    config = replace(config, test_batch_size=4)
    images = replace(tiny.images(folder / "images", 2, 1), augmentation=Augmentation(4, True, cutout=4))
    files = ImageFolder(folder / "images", test="test", sizes=((0, 16), (1, 24)), test_size=16, num_loaders=0)
    text, pairs = tiny.text(folder / "text", 200, 50, context=5), tiny.pairs(folder / "pairs", 40, 5)
    return {
        "memory-images": replace(config, data=images, model=CIFARResNet(8)),
        "folder-images": replace(config, data=files, model=CIFARResNet(8), batch_size=5),
        "text": replace(config, data=text, model=LSTMLanguageModel(16, 2, 0.3)),
        "translation": replace(
            config, data=pairs, model=Transformer(1, 16, 2, 16, 0.2), batch_size=1, precision="bf16"
        ),
    }


def run_locally(config: RunConfig, folder: Path, comm: Communicator) -> None:
    """Train with local updates and synchronize at the end, which `thinwire train` does not; leave the files of a run."""
    data = config.data.load()
    torch.manual_seed(config.seed)
    model = config.model.build(data.num_classes)
    optimizer = config.optimizer.build(model)
    torch.manual_seed(1000 + comm.rank)
    handle = config.parsed_strategy().attach(model, optimizer, comm=comm)
    training = Training(config, model, model, optimizer, torch.amp.GradScaler("cpu", enabled=False), handle)
    rows = []
    for step in steps(config, data, comm, course(config, data, comm.size), 0, Clock()):
        training.carried = None if step.begins_epoch is not None else training.carried
        sums = sum(data.sums(*answer) for answer in training.step(step.batches))
        rows.append({"step": step.number, **data.metrics(comm.all_reduce(sums).wait())})
    handle.synchronize()
    place = folder / "checkpoints" / f"step-{course(config, data, comm.size).num_steps:06d}"
    place.mkdir(parents=True, exist_ok=True)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "averager": handle.state_dict()}
    torch.save(state | {"random": random_state()}, place / f"worker-{comm.rank}.pt")
    if comm.rank == 0:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        write_json(folder / "summary.json", rows[-1])
    handle.detach()
    comm.barrier()


def run_all(comm: Communicator, configs: dict[str, RunConfig], output: Path, is_disturbed: bool) -> None:
    """All runs, one after the other, in this process."""
    with dirty_memory() if is_disturbed else nullcontext(), without_tensorboard():
        for name, config in reversed(configs.items()) if is_disturbed else configs.items():
            run = run_locally if name.startswith("local-updates") else lambda *args: loop.run(*args, NEVER)
            (output / name).mkdir(parents=True, exist_ok=True)
            comm.barrier()
            run(config, output / name, comm)


@contextmanager
def without_tensorboard() -> Iterator[None]:
    """TensorBoard's files are not compared, and its import takes longer than a run."""
    name = "torch.utils.tensorboard"
    before = sys.modules.get(name)
    sys.modules[name] = mock.MagicMock()
    try:
        yield
    finally:  # `mock.patch.dict` would also forget what a run imports, and an extension is loaded once in a process
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> list[Path]:
    """The output folders of both passes."""
    root = tmp_path_factory.mktemp("determinism")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        configs = tasks(root)
        made = {f"{strategy}-{kind}": replace(configs[kind], strategy=STRATEGIES[strategy]) for strategy, kind in PAIRS}
        spawn(2, run_all, made, root / "quiet", False, timeout_seconds=1500, comm_timeout_seconds=120)
        with background_load(1):
            spawn(2, run_all, made, root / "loaded", True, timeout_seconds=1500, comm_timeout_seconds=120)
    return [root / "quiet", root / "loaded"]


@pytest.mark.parametrize(("strategy", "kind"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_a_run_under_load_has_the_bits_of_one_without(strategy, kind, outputs):
    quiet, loaded = (output / f"{strategy}-{kind}" for output in outputs)
    assert len(read_rows(quiet)) == 4 and unfinite(quiet) == []
    assert differences(quiet, loaded) == []


def test_the_comparison_finds_a_changed_bit_a_changed_row_and_a_lost_loss(outputs, tmp_path):
    run = outputs[0] / "gradients-memory-images"
    for name, change in (("weight", flip_a_bit), ("row", change_a_row)):
        copy = tmp_path / name
        (copy / "checkpoints").mkdir(parents=True)
        (copy / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text())
        for path in run.glob("checkpoints/step-*/*.pt"):
            (copy / path.relative_to(run)).parent.mkdir(exist_ok=True)
            (copy / path.relative_to(run)).write_bytes(path.read_bytes())
        assert differences(run, copy) == []
        change(copy)
        assert len(differences(run, copy)) == 1
    assert unfinite(tmp_path / "row") == ["no finite loss at step 4"]


def flip_a_bit(run: Path) -> None:
    path = max(run.glob("checkpoints/step-*/shared.pt"))
    state = torch.load(path, weights_only=True)
    next(iter(state["model"].values())).view(torch.int32).flatten()[0] ^= 1
    torch.save(state, path)


def change_a_row(run: Path) -> None:
    rows = read_rows(run)
    rows[-1]["loss"] = None
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
