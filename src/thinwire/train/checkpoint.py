"""Checkpoints: a folder for each, which appears whole or not at all.

    checkpoints/step-000330/
        shared.pt          what is the same on all workers: step, model, optimizer; where models differ, their mean
        worker-0.pt ...    what differs: the state of each worker's averager, and where they differ model and optimizer

Every file loads with `torch.load(weights_only=True)`, and `shared.pt`'s model has the keys of the plain model. The
folder gets its name when all workers have written their part; then the one before it is removed.
"""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from ..comm import Communicator
from .training import Training


def save(folder: Path, step: int, training: Training, comm: Communicator) -> None:
    """Write a checkpoint and remove the one before it; all workers come here together.

    The averager's state is each worker's own; so are model and optimizer where models differ, and their mean is shared.
    """
    strategy = training.strategy
    averager = {"averager": strategy.handle.state_dict()}  # first: it absorbs messages in flight into the model
    whole = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
    own = averager if not strategy.models_differ else {key: copy.deepcopy(value) for key, value in whole.items()} | averager
    with strategy.handle.average_model(comm):
        write(folder, step, whole if not strategy.models_differ else {"model": training.model.state_dict()}, own, comm)


def write(folder: Path, step: int, shared: dict[str, Any], own: dict[str, Any], comm: Communicator) -> None:
    """Write a checkpoint and remove the one before it; all workers come here together.

    Args:
        folder: the run's `checkpoints` folder, which all workers can write to.
        step: number of steps done.
        shared: values that are the same on all workers; rank 0 writes them.
        own: this worker's values.
        comm: connects the workers.
    """
    unfinished, finished = folder / f".step-{step:06d}", folder / f"step-{step:06d}"
    unfinished.mkdir(parents=True, exist_ok=True)
    torch.save(own, unfinished / f"worker-{comm.rank}.pt")
    if comm.rank == 0:
        torch.save({"step": step, **shared}, unfinished / "shared.pt")
    comm.barrier()
    if comm.rank == 0:
        os.replace(unfinished, finished)
        for other in folder.glob("step-*"):  # leaves what other workers may have begun to write
            if other != finished:
                shutil.rmtree(other)
