"""The adapters for trainers, with the real packages: the examples run, and resume to the same bits as a run without a stop."""

from __future__ import annotations

import ast
import csv
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import elastic_trainer
from helpers.command import with_forked_programs
from helpers.spawn import device_mesh, retire, spawn
from torch import nn

import thinwire as tw
from thinwire.integrations import is_alone
from thinwire.integrations.numbers import SHORT_NAMES

ROOT = Path(__file__).parents[2]
TRAINERS = ROOT / "examples" / "trainers"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


SUMMARY = r"sent [\d.]+ MB, [\d.]+ times less than fp32, [\d.]+ than bf16, blocked [\d.]+s"
BAR = rf"it/s, {SUMMARY}"  # of tqdm
SHOWN = ["sent_mb", "fewer_than_fp32", "fewer_than_bf16", "blocked_seconds"]


def run(command: list[str], *options: object) -> str:
    """What the command prints, the progress bar included; it must succeed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [*command, *map(str, options)], capture_output=True, text=True, timeout=240, env=environment, cwd=TRAINERS
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stderr + done.stdout


def assert_shown(row: dict[str, Any]) -> None:
    """That a row of a trainer's log has all numbers."""
    sent, fp32, bf16, blocked = (float(row[f"thinwire/{name}"]) for name in SHOWN)
    assert sent > 0 and fp32 == pytest.approx(2 * bf16, rel=1e-3) and bf16 > 1 and blocked > 0


def times_fewer(printed: str) -> float:
    *_, found = re.finditer(r"([\d.]+) times less than fp32", printed)
    return float(found[1])


def weights(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    saved = torch.load(path, weights_only=False)
    return saved.get("state_dict", saved)


def assert_equal(a: Path, b: Path) -> None:
    first, second = weights(a), weights(b)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first), (a, b)


LOCAL = "Local(Mean(QSGD(bits=4)), every=12, outer=OuterSGD(0.7))"
"""Where the examples save, workers have taken steps since the last round."""
QUORUM = "Local(Mean(), every=4, outer=OuterSGD(), quorum=Quorum(workers=2))"


def assert_mean(model: dict[str, torch.Tensor], saved: dict[str, Any]) -> None:
    """That a saved model is the mean of those that two workers have for themselves, which differ."""
    first, second = (saved[f"own of rank{rank}"]["model"] for rank in (0, 1))
    assert any(not torch.equal(first[name], second[name]) for name in first)
    for name, value in model.items():
        torch.testing.assert_close(value, (first[name] + second[name]) / 2)


def lightning_shows_numbers(folder: Path) -> None:
    printed = run([sys.executable, str(TRAINERS / "lightning_digits.py")], "--epochs", 1, "--output", folder)
    assert times_fewer(printed) > 15
    words = " ".join(printed.split())  # the bar breaks lines
    assert all(re.search(rf"{name}[:=] ?[\d.]+", words) for name in SHORT_NAMES)
    with open(folder / "lightning_logs" / "version_0" / "metrics.csv", newline="") as file:
        assert_shown(list(csv.DictReader(file))[-1])


def lightning_resumes_with_own_models(folder: Path) -> None:
    example = [sys.executable, str(TRAINERS / "lightning_digits.py"), "--strategy", LOCAL]
    run(example, "--epochs", 2, "--output", folder / "whole")
    run(example, "--epochs", 1, "--output", folder / "first")
    (first,) = (folder / "first").rglob("*.ckpt")
    saved = torch.load(first, weights_only=False)
    assert_mean(saved["state_dict"], saved["thinwire"])
    run(example, "--epochs", 2, "--output", folder / "second", "--resume", first)
    (whole,), (second,) = (folder / "whole").rglob("*.ckpt"), (folder / "second").rglob("*.ckpt")
    assert_equal(whole, second)


def started_processes() -> Any:
    """Lightning's plugin for processes of `spawn`."""
    from lightning.fabric.plugins.environments import LightningEnvironment

    class Started(LightningEnvironment):
        creates_processes_externally = True

        def global_rank(self) -> int:
            return torch.distributed.get_rank()

        def world_size(self) -> int:
            return torch.distributed.get_world_size()

        def local_rank(self) -> int:
            return torch.distributed.get_rank()

        def set_global_rank(self, rank: int) -> None:
            pass

        def set_world_size(self, size: int) -> None:
            pass

    return Started()


def quiet_trainer(**options: Any) -> Any:
    """Lightning's trainer for processes of `spawn`, which shows and saves nothing by itself."""
    import lightning.pytorch as pl

    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    plugins = [started_processes()]
    return pl.Trainer(accelerator="cpu", plugins=plugins, use_distributed_sampler=False, **quiet, **options)


def fabric_of_two() -> Any:
    """Fabric with DDP, in processes that have been started."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", plugins=[started_processes()])
    fabric.launch()
    return fabric


def fabric_worker(comm: tw.comm.Communicator) -> torch.Tensor:
    torch.manual_seed(0)
    net, fabric = nn.Linear(3, 2, bias=False), fabric_of_two()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=1.0))
    with tw.compress_gradients(model, tw.Mean(tw.QSGD(bits=8))) as handle:
        fabric.backward(model(torch.full((1, 3), float(comm.rank))).sum())
        optimizer.step()
        assert [name for name, _ in handle.parameters] == ["weight"]
    assert net.weight.grad is not None
    return net.weight.grad


def lightning_worker(comm: tw.comm.Communicator, folder: Path) -> tuple[list[torch.Tensor], list[str]]:
    """Weights of a run, and of one that went on from what was saved after its first fit; what was saved after an error."""
    import lightning.pytorch as pl

    from thinwire.integrations.lightning import AttachStrategy

    class Linear(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net, self.fails = nn.Linear(4, 4), False

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            if self.fails:
                raise RuntimeError("on purpose")
            return self.net(batch).square().mean()

        def validation_step(self, batch: torch.Tensor, index: int) -> None:
            self.net(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    strategy = "Gradients(Mean(TopK(0.25), ErrorFeedback()))"
    data = torch.utils.data.DataLoader(torch.randn(8, 4, generator=torch.Generator().manual_seed(comm.rank)))

    def trainer(epochs: int, strategy: str = strategy) -> pl.Trainer:
        return quiet_trainer(devices=2, strategy="ddp", max_epochs=epochs, callbacks=[AttachStrategy(strategy)])

    whole, part, resumed = Linear(), Linear(), Linear()
    trainer(2).fit(whole, data)
    first, saved = trainer(1), str(folder / "saved.ckpt")
    first.fit(part, data)
    first.save_checkpoint(saved)
    assert torch.load(saved, weights_only=False)["thinwire"].keys() == {"rank0", "rank1"}
    trainer(2).fit(resumed, data, ckpt_path=saved)

    # A checkpoint that was validated is not gone on from: its state is another strategy's.
    other = trainer(1, "Gradients(Mean())")
    other.validate(part, data, ckpt_path=saved, verbose=False)
    other.fit(part, data)

    part.fails = True
    failed = trainer(1)
    with pytest.raises(RuntimeError, match="on purpose"):
        failed.fit(part, data)
    failed.save_checkpoint(folder / "failed.ckpt")
    keys = list(torch.load(folder / "failed.ckpt", weights_only=False))
    return [module.net.weight.detach() for module in (whole, resumed)], keys


def lightning_own_models_worker(
    comm: tw.comm.Communicator, folder: Path
) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """Weights in the passes of training, in those of validation, and at the end, of workers with models of their own."""
    import lightning.pytorch as pl

    from thinwire.integrations.lightning import AttachStrategy

    class Linear(pl.LightningModule):
        def __init__(self, is_automatic: bool) -> None:
            super().__init__()
            torch.manual_seed(comm.rank)
            self.net, self.automatic_optimization = nn.Linear(4, 4), is_automatic
            self.trained: list[torch.Tensor] = []
            self.validated: list[torch.Tensor] = []

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            self.trained.append(self.net.weight.detach().clone())
            loss = self.net(batch).square().mean()
            if not self.automatic_optimization:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def validation_step(self, batch: torch.Tensor, index: int) -> None:
            self.validated.append(self.net.weight.detach().clone())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = torch.utils.data.DataLoader(torch.randn(7, 4, generator=torch.Generator().manual_seed(comm.rank)))
    modules = [Linear(is_automatic) for is_automatic in (False, True)]
    for module in modules:
        attached = [AttachStrategy("Local(Mean(), every=4)")]
        trainer = quiet_trainer(devices=2, strategy="ddp", max_epochs=2, limit_val_batches=1, callbacks=attached)
        trainer.fit(module, data, data)
    trainer.save_checkpoint(folder / "ended.ckpt")
    for callback in (pl.callbacks.StochasticWeightAveraging(1e-2), pl.callbacks.EMAWeightAveraging()):
        trainer.callbacks = [AttachStrategy("Local(Mean(), every=4)"), callback]
        with pytest.raises(ValueError, match=f"{type(callback).__name__} would put an average over the steps"):
            trainer.fit(module, data)
    two = SimpleNamespace(world_size=2, precision_plugin=None, strategy=trainer.strategy, optimizers=[None, None])
    with pytest.raises(ValueError, match="follows the steps of one optimizer, and the module has 2; return one"):
        AttachStrategy("Local(Mean(), every=4)").on_fit_start(two, module)
    assert torch.equal(modules[0].net.weight, module.net.weight)
    return module.trained, module.validated, module.net.weight.detach()


def lightning_sharded_worker(comm: tw.comm.Communicator, folder: Path, strategy: str) -> torch.Tensor:
    """The shard of a run in two replicas of two shards, which one that went on from a checkpoint must also have."""
    import lightning.pytorch as pl
    from torch.distributed.fsdp import fully_shard

    from thinwire.integrations.lightning import AttachStrategy

    retire()  # Lightning makes a mesh

    class Linear(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 4)

        def configure_model(self) -> None:
            fully_shard(self.net, mesh=self.device_mesh["tensor_parallel"])

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    data = torch.utils.data.DataLoader(torch.randn(7, 4, generator=torch.Generator().manual_seed(comm.rank)))

    def fitted(epochs: int, checkpoint: Path | None = None) -> tuple[pl.Trainer, nn.Linear]:
        module = Linear()
        trainer = quiet_trainer(
            devices=4,
            strategy=pl.strategies.ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2),
            max_epochs=epochs,
            callbacks=[AttachStrategy(strategy, replicas=lambda module: module.device_mesh["data_parallel"]), Save()],
        )
        trainer.fit(module, data, ckpt_path=checkpoint)
        return trainer, module.net

    class Save(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            if trainer.current_epoch == 0 and not (folder / "saved").exists():
                trainer.save_checkpoint(folder / "saved")

    _, whole = fitted(2)
    _, resumed = fitted(2, folder / "saved")
    assert torch.equal(whole.weight.to_local(), resumed.weight.to_local())
    return whole.weight.full_tensor().detach()


def metrics_worker(comm: tw.comm.Communicator) -> float:
    """The mean squared error over all workers, whose own errors are 1, 4, ..."""
    from torchmetrics import MeanSquaredError  # it comes with Lightning

    model, error = nn.Linear(3, 2), MeanSquaredError()
    with tw.compress_gradients(model, tw.Mean(tw.QSGD(bits=8)), comm=comm):
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()
            error.update(torch.zeros(4), torch.full((4,), 1.0 + comm.rank))
            error.compute()
    return error.compute().item()


def lightning_works(folder: Path) -> None:
    assert spawn(2, metrics_worker) == [2.5, 2.5]
    for gradient in spawn(2, fabric_worker):
        torch.testing.assert_close(gradient, torch.full((2, 3), 0.5))
    from thinwire.integrations.lightning import AttachStrategy

    with pytest.raises(ValueError, match="on all workers together, .* leave the quorum out"):
        AttachStrategy(QUORUM)
    with pytest.raises(ValueError, match=r"call thinwire.compress_shards\(model\) after that instead"):
        AttachStrategy("Shards()")
    for (whole, resumed), keys in spawn(2, partial(lightning_worker, folder=folder)):
        assert torch.equal(whole, resumed)
        assert "state_dict" in keys and "thinwire" not in keys
    (trained, validated, ended), (others, _, other_end) = spawn(2, partial(lightning_own_models_worker, folder=folder))
    # Of 14 steps, 4, 8 and 12 are followed by a round; validation comes before all, after 7 and after 14.
    differs = [not torch.equal(a, b) for a, b in zip(trained, others, strict=True)]
    assert differs == [False, True, True, True] * 3 + [False, True]
    first, second, last = validated
    assert torch.equal(first, trained[0]) and torch.equal(last, ended) and torch.equal(ended, other_end)
    torch.testing.assert_close(second, (trained[7] + others[7]) / 2)
    saved = torch.load(folder / "ended.ckpt", weights_only=False)
    for model in (saved["state_dict"], *(saved["thinwire"][f"own of rank{rank}"]["model"] for rank in (0, 1))):
        assert torch.equal(model["net.weight"], ended)
    elastic_trainer.works("lightning", elastic_trainer.STRATEGIES[:2], folder / "elastic")
    lightning_shows_numbers(folder / "shown")
    lightning_resumes_with_own_models(folder / "own")
    with pytest.raises(ValueError, match="replicas must be a function of the module, got 'data_parallel'"):
        AttachStrategy("Gradients(Mean())", replicas="data_parallel")
    for i, strategy in enumerate(("Gradients(Mean(TopK(0.25), ErrorFeedback()))", "Local(Mean(), every=4)")):
        ends = spawn(4, partial(lightning_sharded_worker, folder=folder / f"sharded{i}", strategy=strategy))
        assert all(torch.equal(end, ends[0]) for end in ends)
    assert_mean_of_shards(folder / "sharded1" / "saved")


def assert_mean_of_shards(checkpoint: Path) -> None:
    """That a sharded model was saved as the mean of the replicas, beside their own."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(checkpoint, checkpoint / "whole.pt")
    saved = torch.load(checkpoint / "whole.pt")["state_dict"]["net.weight"]
    own = torch.load(checkpoint / "meta.pt", weights_only=False)["thinwire"]
    parts = {key: part["model"]["net.weight"] for key, part in own.items() if "own of" in key}
    first, second = (
        torch.cat([parts[f"shard {shard} of 2, own of rank{rank}"] for shard in (0, 1)]) for rank in (0, 1)
    )
    assert not torch.equal(first, second)
    torch.testing.assert_close(saved, (first + second) / 2)


def accelerate_resumes(folder: Path) -> None:
    example = [*TORCHRUN, str(TRAINERS / "accelerate_digits.py")]
    printed = run(example, "--epochs", 1, "--output", folder / "first")
    assert times_fewer(printed) > 15
    assert re.search(BAR, printed)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "first" / "digits")).Reload()
    assert_shown({f"thinwire/{name}": events.Scalars(f"thinwire/{name}")[-1].value for name in SHOWN})
    saved = torch.load(folder / "first" / "custom_checkpoint_0.pkl", weights_only=False)
    assert saved.keys() == {"rank0", "rank1"}
    run(example, "--epochs", 1, "--output", folder / "second", "--resume", folder / "first")
    again = torch.load(folder / "second" / "custom_checkpoint_0.pkl", weights_only=False)
    # The second run went on from the first one's state, on the worker that wrote no file too.
    assert again["rank1"]["progress"]["step"] == 2 * saved["rank1"]["progress"]["step"] > 0


def accelerate_saves_own_models(folder: Path) -> None:
    example = [*TORCHRUN, str(TRAINERS / "accelerate_digits.py"), "--strategy", LOCAL]
    run(example, "--epochs", 1, "--output", folder / "first")
    saved = torch.load(folder / "first" / "custom_checkpoint_0.pkl", weights_only=False)
    assert_mean(weights(folder / "first" / "model.safetensors"), saved)
    run(example, "--epochs", 0, "--output", folder / "second", "--resume", folder / "first")
    again = torch.load(folder / "second" / "custom_checkpoint_0.pkl", weights_only=False)
    assert_equal_states(again, saved)  # each worker took up its own
    assert_equal(folder / "first" / "model.safetensors", folder / "second" / "model.safetensors")


def accelerate_worker(comm: tw.comm.Communicator, folder: Path) -> None:
    """Save after `detach`, as a script that ends averaging first, and go on from it under a second strategy."""
    from accelerate import Accelerator

    from thinwire.integrations.accelerate import attach

    retire()  # Accelerate keeps what it found of the processes
    rank = str(comm.rank)
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "RANK": rank, "LOCAL_RANK": rank}
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "2")
    accelerator = Accelerator(cpu=True)
    plain = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))

    def train(resume: bool) -> torch.Tensor:
        strategy = attach(accelerator, model, optimizer, "Local(Mean(), every=3)")
        if resume:
            accelerator.load_state(str(folder))
        optimizer.zero_grad()
        accelerator.backward(model(torch.full((1, 2), 1.0 + comm.rank)).sum())
        optimizer.step()
        own = plain.weight.detach().clone()
        strategy.detach()
        if not resume:
            accelerator.save_state(str(folder))
            accelerator.wait_for_everyone()
        return own

    own = train(resume=False)
    mean = plain.weight.detach().clone()
    assert not torch.equal(own, mean)
    assert torch.equal(weights(folder / "model.safetensors")["weight"], mean)
    saved = torch.load(folder / "custom_checkpoint_0.pkl", weights_only=False)
    assert saved.keys() == {"rank0", "rank1", "own of rank0", "own of rank1"}
    with torch.no_grad():
        plain.weight.zero_()
    torch.testing.assert_close(train(resume=True), mean - 0.1 * (1 + comm.rank))


def accelerate_sharded_worker(comm: tw.comm.Communicator, folder: Path, strategy: str) -> None:
    """Go on from what two replicas of two shards saved, to the same bits as without a stop."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, load_fsdp_model
    from torch.distributed.fsdp import fully_shard

    from thinwire.integrations.accelerate import attach

    mesh, rank = device_mesh(2, 2), str(comm.rank)
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "RANK": rank, "LOCAL_RANK": rank}
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "4")
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU  # else Accelerate has no FSDP
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="NO_WRAP", state_dict_type="SHARDED_STATE_DICT"
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=2)
    plain = fully_shard(nn.Linear(4, 4), mesh=mesh["shard"])
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9))

    def attached() -> Any:
        return attach(accelerator, model, optimizer, strategy, replicas=mesh["replicate"])

    def train(steps: range) -> torch.Tensor:
        for step in steps:
            with accelerator.accumulate(model):
                x = torch.randn(2, 4, generator=torch.Generator().manual_seed(100 * step + comm.rank))
                accelerator.backward(model(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        return model.weight.detach().to_local().clone()

    with attached() as handle:
        train(range(4))
        accelerator.save_state(str(folder))
        with handle.average_model():
            mean = model.weight.to_local().clone()
        expected = train(range(4, 8))
        accelerator.wait_for_everyone()
    with attached() as handle:
        load_fsdp_model(plugin, accelerator, model, str(folder))
        assert torch.equal(model.weight.to_local(), mean)
        accelerator.load_state(str(folder))
        assert torch.equal(train(range(4, 8)), expected)
    assert len(set(map(str, comm.gather_objects(model.weight.full_tensor().tolist())))) == 1


def accelerate_works(folder: Path) -> None:
    spawn(2, accelerate_worker, folder / "detached")
    for i, strategy in enumerate(("Gradients(Mean(TopK(0.25), ErrorFeedback()))", "Local(Mean(), every=3)")):
        spawn(4, accelerate_sharded_worker, folder / f"sharded{i}", strategy)
    accelerate_resumes(folder)
    accelerate_saves_own_models(folder / "own")


def transformers_worker(comm: tw.comm.Communicator, folder: Path, damaged: bytes) -> str:
    """What a worker says of a checkpoint whose file of rank 1 has only these bytes; without any, there is no file."""
    from thinwire.integrations.transformers import AttachStrategy

    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    callbacks = SimpleNamespace(callbacks=[])
    trainer = SimpleNamespace(
        model_wrapped=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        accelerator=SimpleNamespace(scaler=None),
        callback_handler=callbacks,
    )
    arguments = SimpleNamespace(world_size=2, process_index=comm.rank, output_dir=str(folder))
    callback = AttachStrategy(trainer, "Gradients(Mean(TopK(0.5), ErrorFeedback()))")
    callback.on_train_begin(arguments, SimpleNamespace(global_step=0), None)
    model(torch.ones(1, 2)).sum().backward()
    callback.on_save(arguments, SimpleNamespace(global_step=3), None)
    torch.distributed.barrier()  # rank 1 may read the file of rank 0
    if comm.rank == 1:
        file = folder / "checkpoint-3" / "thinwire-rank1.pt"
        file.write_bytes(damaged) if damaged else file.unlink()
    with pytest.raises(ValueError) as found:
        callback.on_train_begin(arguments, SimpleNamespace(global_step=3), None)
    return str(found.value)


def saved_by_thread(comm: tw.comm.Communicator, folder: Path) -> None:
    """Save what a worker of `transformers_own_models_worker` has after 3 steps and a round, on another number of workers."""
    from thinwire.integrations.state import WorkerState

    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tw.attach(model, optimizer, "Local(Mean(), every=3)", comm=comm) as strategy:
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        torch.save(WorkerState(strategy, model, [optimizer]).state_dict(), folder / f"thinwire-rank{comm.rank}.pt")


def transformers_own_models_worker(
    comm: tw.comm.Communicator, folder: Path
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights of a model of a worker's own while its trainer evaluates it, after that, and when training has ended.

    The worker also resumes what one and three workers saved.
    """
    from thinwire.integrations.transformers import AttachStrategy

    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    trainer = SimpleNamespace(
        model_wrapped=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        accelerator=SimpleNamespace(scaler=None),
        callback_handler=SimpleNamespace(callbacks=[]),
        is_fsdp_enabled=True,
        **dict.fromkeys(
            ("evaluate", "predict", "save_model", "_save_optimizer_and_scheduler"),
            lambda: model.module.weight.detach().clone(),
        ),
        _load_best_model=lambda: nn.init.ones_(model.module.weight),
    )
    arguments = SimpleNamespace(world_size=2, process_index=comm.rank, output_dir="")
    in_flight = AttachStrategy(trainer, "Local(Mean(), every=2, delay=1)")
    in_flight.on_train_begin(arguments, SimpleNamespace(global_step=0), None)
    for _ in range(2):
        trainer.optimizer.step()
    trainer._load_best_model()
    in_flight.on_train_end(arguments, SimpleNamespace(global_step=1), None)
    assert torch.equal(model.module.weight, torch.ones(1, 2))
    callback = AttachStrategy(trainer, "Local(Mean(), every=4)")
    callback.on_train_begin(arguments, SimpleNamespace(global_step=0), None)
    model(torch.full((1, 2), 1.0 + comm.rank)).sum().backward()
    trainer.optimizer.step()
    seen = [trainer.evaluate(), trainer.predict(), trainer.save_model(), trainer._save_optimizer_and_scheduler()]
    assert all(torch.equal(one, seen[0]) for one in seen)
    own = model.module.weight.detach().clone()
    callback.on_train_end(arguments, SimpleNamespace(global_step=1), None)
    assert torch.equal(trainer.evaluate(), model.module.weight)  # no longer together
    ended = model.module.weight.detach().clone()
    for name in ("one", "three"):
        resumed = AttachStrategy(trainer, "Local(Mean(), every=3)", resume_from=folder / name)
        resumed.on_train_begin(arguments, SimpleNamespace(global_step=3), None)
        (own_state,) = resumed.handle.state_dict().values()
        assert own_state["fragments"][0]["state"]["progress"]["step"] == 1
        resumed.handle.detach()
    return seen[0], own, ended


def transformers_works(folder: Path) -> None:
    from thinwire.integrations.transformers import AttachStrategy

    with pytest.raises(ValueError, match="on all workers together, .* leave the quorum out"):
        AttachStrategy(SimpleNamespace(callback_handler=SimpleNamespace(callbacks=[])), QUORUM)
    for damaged, expected in (
        (b"", "no state to resume from at"),
        (b"half", r"cannot read .*thinwire-rank1.pt \(\w+: .+\)"),
    ):
        first, second = spawn(2, partial(transformers_worker, folder=folder, damaged=damaged))
        assert first == second and re.match(f"rank 1: .*{expected}", first), first
    for number, name in ((1, "one"), (3, "three")):
        (folder / name).mkdir()
        tw.LocalWorld(number).run(partial(saved_by_thread, folder=folder / name))
    (evaluated, own, ended), (same, other, same_end) = spawn(2, partial(transformers_own_models_worker, folder=folder))
    assert torch.equal(evaluated, same) and not torch.equal(own, other)
    torch.testing.assert_close(evaluated, (own + other) / 2)
    assert torch.equal(ended, same_end) and torch.equal(ended, evaluated)
    elastic_trainer.works("transformers", elastic_trainer.STRATEGIES, folder / "elastic")
    transformers_resumes(folder)
    transformers_resumes_with_own_models(folder / "own")


def transformers_resumes(folder: Path) -> None:
    example = [*TORCHRUN, str(TRAINERS / "transformers_gpt.py")]
    printed = run(example, "--steps", 40, "--output", folder)
    assert times_fewer(printed) > 5
    assert re.search(BAR, printed)
    rows = [ast.literal_eval(line) for line in printed.splitlines() if line.startswith("{'loss'")]
    assert len(rows) == 4
    assert_shown(rows[-1])
    whole = folder / "checkpoint-40"
    assert {f.name for f in whole.glob("thinwire-*")} == {"thinwire-rank0.pt", "thinwire-rank1.pt"}
    whole.rename(folder / "whole")
    run(example, "--steps", 40, "--output", folder, "--resume", folder / "checkpoint-20")
    assert_equal(folder / "whole" / "model.safetensors", folder / "checkpoint-40" / "model.safetensors")


def transformers_resumes_with_own_models(folder: Path) -> None:
    example = [*TORCHRUN, str(TRAINERS / "transformers_gpt.py"), "--strategy", LOCAL]
    printed = run(example, "--steps", 40, "--output", folder)
    assert times_fewer(printed) > 8  # two checkpoints and the end send the model itself
    whole = folder / "checkpoint-40"
    saved = torch.load(whole / "thinwire-rank0.pt") | torch.load(whole / "thinwire-rank1.pt")
    assert_mean(weights(whole / "model.safetensors"), saved)
    whole.rename(folder / "whole")
    run(example, "--steps", 40, "--output", folder, "--resume", folder / "checkpoint-20")
    assert_equal(folder / "whole" / "model.safetensors", folder / "checkpoint-40" / "model.safetensors")


def torchtitan_resumes(folder: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    example = [*TORCHRUN[:-1], "4", str(TRAINERS / "torchtitan_gpt.py"), "--save-every", "4", "--log-every", "2"]
    printed = run(example, "--steps", 8, "--output", folder)
    assert times_fewer(printed) > 4
    assert len(re.findall(rf"step: .* loss: .* thinwire: {SUMMARY}", printed)) == 4
    (folder / "step-8").rename(folder / "whole")
    run(example, "--steps", 8, "--output", folder, "--resume", 4)
    for name in ("whole", "step-8"):
        dcp_to_torch_save(folder / name, folder / f"{name}.pt")
    whole, resumed = (torch.load(folder / f"{name}.pt") for name in ("whole", "step-8"))
    assert whole["shards"] == resumed["shards"] == dict.fromkeys(whole["shards"], 8)
    assert_equal_states(whole, resumed)


def assert_equal_states(a: Any, b: Any) -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal_states(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_equal_states(one, other)
    else:
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


# The programs of a trainer are forked from a process that has imported it, which takes longer than they do.


def test_a_communicator_of_processes_that_the_trainer_does_not_know_is_refused():
    """The adapters of Lightning and Transformers attached to nothing, without a word."""
    comm = tw.comm.LocalWorld(2).run(lambda comm: comm)[0]
    with pytest.raises(ValueError, match="the trainer has one process, and comm connects others; start them with"):
        is_alone(1, {"comm": comm})
    assert [is_alone(size, {}) for size in (1, 2)] == [True, False] and not is_alone(2, {"comm": comm})


def test_lightning(tmp_path):
    with_forked_programs(["lightning.pytorch", "sklearn.datasets"], lightning_works, tmp_path)


def test_accelerate(tmp_path):
    with_forked_programs(["accelerate", "sklearn.datasets", "torch.distributed.run"], accelerate_works, tmp_path)


def test_transformers(tmp_path):
    modules = ["transformers.trainer", "transformers.models.gpt2.modeling_gpt2", "torch.distributed.run"]
    with_forked_programs(modules, transformers_works, tmp_path)


def test_a_loop_in_the_style_of_torchtitan(tmp_path):
    modules = ["torch.distributed.run", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict"]
    with_forked_programs(modules, torchtitan_resumes, tmp_path)


PAGES = (ROOT / "docs/guide/trainers.md").read_text() + (ROOT / "docs/sharded.md").read_text().partition("## Check")[2]


@pytest.mark.parametrize("fence", re.findall(r"```python\n(.*?)```", PAGES, re.S))
def test_the_guide_shows_what_the_examples_run(fence: str):
    examples = [path.read_text() for path in TRAINERS.glob("*.py")]
    for part in fence.strip("\n").split("\n...\n"):
        assert any(part in example for example in examples), part
