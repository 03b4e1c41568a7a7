"""What the studies share: runs that are trained unless they are there, rows of results, and a plain training loop."""

from __future__ import annotations

import copy
import fcntl
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import thinwire as tw
from thinwire.lab.report import Run, read_run
from thinwire.lab.train import RunConfig, train
from thinwire.lab.train.data import Digits, num_batches, shard
from thinwire.lab.train.data.base import IGNORE
from thinwire.lab.train.models import apply
from thinwire.lab.train.optimize import Optimizer, set_learning_rate

Batch = tuple[tuple[Tensor, ...], Tensor]
"""Inputs of a model, and labels."""


def finished(config: RunConfig, words: str, label: str | None = None, may_train: bool = True) -> Run | None:
    """The run of this configuration, trained now unless it was before; None where it was not and is not wanted.

    Args:
        config: without its name.
        words: that set it apart from the other runs in its output folder; its name is made of them.
        label: what to call it.
        may_train: whether it is wanted.
    """
    name = re.sub(r"[^\w.]+", "-", words).strip("-").lower()
    folder = config.output / name
    if may_train:
        train(replace(config, name=name, resume=True))
    return read_run(folder, label or words) if (folder / "summary.json").exists() else None


# ---- rows of results ----


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of all finished runs, a line of JSON each."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def some(path: Path) -> list[dict[str, Any]]:
    """The rows, of which there is at least one: a page would lose its table to an empty one."""
    if not (rows := read(path)):
        raise ValueError(f"{path} has no finished run; train first, or give another --results")
    return rows


def append(path: Path, row: dict[str, Any]) -> None:
    """Add the row of a run, and show it; several processes may share the file."""
    print(json.dumps(row), flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(row) + "\n")


def once(path: Path, key: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> None:
    """Append the row `key | measure()` with the seconds that it took, unless the file has a row with this key."""
    if not any(key.items() <= row.items() for row in read(path)):
        began = time.monotonic()
        append(path, key | measure() | {"seconds": round(time.monotonic() - began, 1)})


# ---- training without the lab's loop ----


def trained(
    comm: tw.comm.Communicator,
    initial: nn.Module,
    settings: Optimizer,
    strategy: str | tw.strategy.Strategy,
    seed: int,
    batches: Sequence[Batch],
    clip_norm: float | None = None,
) -> tuple[nn.Module, tw.comm.Ledger]:
    """One worker's copy of the `initial` model after a step for each batch, and the ledger."""
    model = copy.deepcopy(initial)
    optimizer = settings.build(model)
    multiples = [group["lr"] / settings.learning_rate for group in optimizer.param_groups]
    handle = tw.attach(model, optimizer, strategy, comm=comm, seed=seed)
    model.train()
    for step, (inputs, labels) in enumerate(batches):
        set_learning_rate(optimizer, settings.learning_rate_at(step, len(batches)), multiples)
        optimizer.zero_grad()
        loss_of(model, inputs, labels).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
    if isinstance(handle, tw.strategy.LocalUpdates):
        handle.synchronize()
    handle.detach()
    return model, handle.ledger


def loss_of(model: nn.Module, inputs: tuple[Tensor, ...], labels: Tensor) -> Tensor:
    """Mean cross-entropy, in nats an image or a token."""
    scores, _ = apply(model, inputs)
    return cross_entropy(scores.flatten(0, -2), labels.flatten(), ignore_index=IGNORE)


@cache
def digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Images and labels of the digits to learn from, and of those for the test."""
    learn, test = Digits().splits()
    return tuple(learn), tuple(test)  # type: ignore[return-value]


def digit_batches(rank: int, size: int, seed: int, epochs: int, batch_size: int) -> Iterator[Batch]:
    """A worker's batches of all epochs, as the digits recipe deals them out."""
    images, labels = digits()[0]
    per_epoch = num_batches(len(labels), size, batch_size)
    for epoch in range(epochs):
        for batch in shard(len(labels), rank, size, seed, epoch)[: per_epoch * batch_size].split(batch_size):
            yield (images[batch],), labels[batch]


@torch.no_grad()
def digit_accuracy(model: nn.Module) -> float:
    """Share of the test images that are recognised, in per cent."""
    images, labels = digits()[1]
    return 100 * (model.eval()(images).argmax(1) == labels).double().mean().item()
