"""One worker's run, from the first weight to the summary.

    1. data and model    the same on every worker, from the seed
    2. strategy          one line: `compress_gradients`
    3. steps             forward, backward (gradients are averaged meanwhile), optimizer
    4. metrics           a row every few steps; after an epoch also the test, and a checkpoint
    5. summary           what was learned, and what it cost on the wire

All workers run this alike; rank 0 also shows the progress and writes the files. Metrics travel over a communicator of
their own, so that the ledger counts gradients alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..comm import Communicator
from ..parallel import GradientCompression, compress_gradients
from . import checkpoint
from .config import RunConfig
from .data import Split, num_batches, shard
from .meter import Meter, averages, sums
from .optimize import set_learning_rate
from .progress import Progress
from .records import Records, write_json


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
    train, test = config.data.load()
    num_steps = count_steps(config, comm.size, len(train.labels))
    torch.manual_seed(config.seed)
    model = config.model.build()
    optimizer = config.optimizer.build(model)

    compression = compress_gradients(model, config.parsed_averager(), seed=config.seed)

    watchers = [Progress(folder.name, num_steps), Records(folder)] if comm.rank == 0 else []
    try:
        meter = Meter(compression, comm)
        for step in steps(config, comm, len(train.labels), num_steps):
            if step.begins_epoch is not None:
                compression.set_epoch(step.begins_epoch)
            learning_rate = config.optimizer.learning_rate_at(step.number - 1, num_steps)
            set_learning_rate(optimizer, learning_rate)
            batch = Split(*(part[step.indices] for part in train))
            with meter.clock("step"):
                scores = train_step(model, optimizer, batch)
            meter.add(scores, batch.labels)
            if step.number % config.log_every and not step.ends_epoch:
                continue
            row = {"step": step.number, "epoch": step.epoch, "learning_rate": learning_rate} | meter.row()
            if step.ends_epoch:
                row |= evaluate(model, test, comm)
                save_checkpoint(folder, step.number, model, optimizer, compression, comm)
            for watcher in watchers:
                watcher.row(row)
    finally:
        for watcher in watchers:
            watcher.close()

    if comm.rank == 0:
        write_json(folder / "summary.json", summary(config, row, compression))
    compression.detach()


def count_steps(config: RunConfig, size: int, num_examples: int) -> int:
    """Steps of the whole run on `size` workers."""
    num_steps = config.epochs * num_batches(num_examples, size, config.batch_size)
    return min(num_steps, config.max_steps or num_steps)


def steps(config: RunConfig, comm: Communicator, num_examples: int, num_steps: int) -> Iterator[Step]:
    """All steps of the run; the last of them ends an epoch, whole or not."""
    per_epoch = num_batches(num_examples, comm.size, config.batch_size)
    for i in range(num_steps):
        epoch, position = divmod(i, per_epoch)
        if position == 0:
            share = shard(num_examples, comm.rank, comm.size, config.seed, epoch)
        indices = share[position * config.batch_size : (position + 1) * config.batch_size]
        ends_epoch = i + 1 in ((epoch + 1) * per_epoch, num_steps)
        yield Step(i + 1, (i + 1) / per_epoch, epoch if position == 0 else None, ends_epoch, indices)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Split) -> Tensor:
    """One step on this worker's batch; returns its scores (N, classes)."""
    model.train()
    optimizer.zero_grad()
    scores = model(batch.inputs)
    F.cross_entropy(scores, batch.labels).backward()  # when this returns, gradients are averaged
    optimizer.step()
    return scores.detach()


@torch.no_grad()
def evaluate(model: nn.Module, test: Split, comm: Communicator) -> dict[str, float]:
    """Loss and accuracy on the test set, which is shared out over the workers."""
    model.eval()
    inputs, labels = (part[comm.rank :: comm.size] for part in test)
    loss, accuracy, _ = averages(sums(model(inputs), labels), comm)
    return {"test_loss": loss, "test_accuracy": accuracy}


def save_checkpoint(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    compression: GradientCompression,
    comm: Communicator,
) -> None:
    """Model and optimizer are the same on all workers; the averager's state is each worker's own."""
    shared = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    checkpoint.save(folder / "checkpoints", step, shared, {"averager": compression.state_dict()}, comm)


def summary(config: RunConfig, last: dict[str, float], compression: GradientCompression) -> dict[str, Any]:
    """What `summary.json` says; bytes are means over the workers, who may differ."""
    ledger, bytes_sent = compression.ledger, last["bytes_sent"]
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
        },
        "bytes_sent_per_worker": bytes_sent,
        "dense_fp32_bytes": ledger.dense_fp32_bytes,
        "dense_bf16_bytes": ledger.dense_bf16_bytes,
        "compression_vs_fp32": ledger.dense_fp32_bytes / bytes_sent if bytes_sent else None,
        "seconds": last["seconds"],
    }
