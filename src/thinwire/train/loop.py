"""One worker's run, from the first weight to the summary.

    1. data and model    the same on every worker, from the seed
    2. strategy          one line: `compress_gradients`, or `gossip_parameters`, as the averager asks for (`strategy.py`)
    3. steps             forward, backward (gradients are averaged meanwhile), optimizer (parameters are, here)
    4. metrics           a row every few steps; after an epoch also a checkpoint, and its test
    5. summary           what was learned, and what it cost on the wire

All workers run this alike; rank 0 also shows the progress and writes the files. Metrics travel over a communicator of
their own, so that the ledger counts training alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..allocator import keep_freed_memory
from ..comm import Communicator
from . import checkpoint
from .config import RunConfig
from .data import Split, num_batches, shard, uneven_shard
from .meter import Meter, averages, sums
from .optimize import set_learning_rate
from .progress import Progress
from .records import Records, write_json
from .strategy import Strategy, attach


class Step(NamedTuple):
    """A step, numbered from 1, and the examples that this worker takes in it."""

    number: int
    epoch: float
    begins_epoch: int | None
    ends_epoch: bool
    indices: Tensor


def run(config: RunConfig, folder: Path, comm: Communicator) -> None:
    """Train as `config` says and leave the records in `folder`; all workers call this together."""
    torch.set_num_threads(config.threads)
    keep_freed_memory()
    train, test = config.data.load()
    num_steps = count_steps(config, comm.size, len(train.labels))
    torch.manual_seed(config.seed)
    model = config.model.build()
    optimizer = config.optimizer.build(model)

    strategy = attach(config, model, optimizer)

    watchers = [Progress(folder.name, num_steps), Records(folder)] if comm.rank == 0 else []
    try:
        meter = Meter(strategy, comm)
        for step in steps(config, comm, train.labels, num_steps):
            if step.begins_epoch is not None:
                strategy.handle.set_epoch(step.begins_epoch)
            learning_rate = config.optimizer.learning_rate_at(step.number - 1, num_steps, comm.size)
            set_learning_rate(optimizer, learning_rate)
            batch = Split(*(part[step.indices] for part in train))
            with meter.clock("step"):
                scores = train_step(model, optimizer, batch)
            meter.add(scores, batch.labels)
            if step.number % config.log_every and not step.ends_epoch:
                continue
            row = {"step": step.number, "epoch": step.epoch, "learning_rate": learning_rate} | meter.row()
            if step.ends_epoch:
                save_checkpoint(folder, step.number, model, optimizer, strategy, comm)
                row |= evaluate(model, test, strategy, comm)
            for watcher in watchers:
                watcher.row(row)
    finally:
        for watcher in watchers:
            watcher.close()

    if comm.rank == 0:
        write_json(folder / "summary.json", summary(config, row, strategy))
    strategy.handle.detach()


def count_steps(config: RunConfig, size: int, num_examples: int) -> int:
    """Steps of the whole run on `size` workers."""
    num_steps = config.epochs * num_batches(num_examples, size, config.batch_size)
    return min(num_steps, config.max_steps or num_steps)


def steps(config: RunConfig, comm: Communicator, labels: Tensor, num_steps: int) -> Iterator[Step]:
    """All steps of the run; the last of them ends an epoch, whole or not."""
    per_epoch = num_batches(len(labels), comm.size, config.batch_size)
    for i in range(num_steps):
        epoch, position = divmod(i, per_epoch)
        if position == 0:
            share = share_of(labels, config, comm, epoch)
        indices = share[position * config.batch_size : (position + 1) * config.batch_size]
        ends_epoch = i + 1 in ((epoch + 1) * per_epoch, num_steps)
        yield Step(i + 1, (i + 1) / per_epoch, epoch if position == 0 else None, ends_epoch, indices)


def share_of(labels: Tensor, config: RunConfig, comm: Communicator, epoch: int) -> Tensor:
    """Indices of this worker's examples in an epoch, in the order of use."""
    if config.split == "even":
        return shard(len(labels), comm.rank, comm.size, config.seed, epoch)
    keys = labels if config.split == "by-class" else torch.arange(len(labels))
    return uneven_shard(keys, comm.rank, comm.size, config.seed, epoch, config.shuffled)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Split) -> Tensor:
    """One step on this worker's batch; returns its scores (N, classes)."""
    model.train()
    optimizer.zero_grad()
    scores = model(batch.inputs)
    F.cross_entropy(scores, batch.labels).backward()  # averagers of gradients work in it
    optimizer.step()  # averagers of parameters in this
    return scores.detach()


@torch.no_grad()
def evaluate(model: nn.Module, test: Split, strategy: Strategy, comm: Communicator) -> dict[str, float]:
    """Loss and accuracy on the test set; where models differ, means over the workers' models, and those of the mean model."""
    model.eval()
    if not strategy.models_differ:
        return evaluate_together(model, test, comm)
    loss, accuracy, _ = averages(sums(model(test.inputs), test.labels), comm)
    with strategy.handle.average_model(comm):
        of_mean = evaluate_together(model, test, comm)
    return {"test_loss": loss, "test_accuracy": accuracy} | {f"mean_model_{key}": value for key, value in of_mean.items()}


def evaluate_together(model: nn.Module, test: Split, comm: Communicator) -> dict[str, float]:
    """Loss and accuracy of a model that all workers have, who share out the test set."""
    inputs, labels = (part[comm.rank :: comm.size] for part in test)
    loss, accuracy, _ = averages(sums(model(inputs), labels), comm)
    return {"test_loss": loss, "test_accuracy": accuracy}


def save_checkpoint(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy,
    comm: Communicator,
) -> None:
    """The averager's state is each worker's own; so are model and optimizer where models differ, and their mean is shared."""
    averager = {"averager": strategy.handle.state_dict()}  # first: it absorbs messages in flight into the model
    whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if not strategy.models_differ:
        checkpoint.save(folder / "checkpoints", step, whole, averager, comm)
        return
    own = {key: copy.deepcopy(value) for key, value in whole.items()} | averager
    with strategy.handle.average_model(comm):
        checkpoint.save(folder / "checkpoints", step, {"model": model.state_dict()}, own, comm)


def summary(config: RunConfig, last: dict[str, float], strategy: Strategy) -> dict[str, Any]:
    """What `summary.json` says; bytes are means over the workers, who may differ."""
    ledger, bytes_sent = strategy.handle.ledger, last["bytes_sent"]
    of_differing = ("mean_model_test_accuracy", "mean_model_test_loss", "consensus_distance")
    return {
        "recipe": config.recipe,
        "averager": repr(config.parsed_averager()),
        "workers": config.workers,
        "seed": config.seed,
        "final": {
            "test_accuracy": last["test_accuracy"],
            "test_loss": last["test_loss"],
            "train_accuracy": last["accuracy"],
            "train_loss": last["loss"],
            "steps": last["step"],
        }
        | {key: last[key] for key in of_differing if key in last},
        "bytes_sent_per_worker": bytes_sent,
        "dense_fp32_bytes": ledger.dense_fp32_bytes,
        "dense_bf16_bytes": ledger.dense_bf16_bytes,
        "compression_vs_fp32": ledger.dense_fp32_bytes / bytes_sent if bytes_sent else None,
        "seconds": last["seconds"],
    }
