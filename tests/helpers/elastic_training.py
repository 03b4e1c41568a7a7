"""An elastic training run in which two workers kill themselves; for tests."""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path

import torch

from thinwire.lab.recipes import recipes
from thinwire.lab.train import train

DYING = {4: 2, 8: 0}  # step -> number of the worker that dies after it


def dying(model, row, comm):
    """A callback: workers die once each; else it counts how many different models there are."""
    number = DYING.get(row["step"])
    died = Path(f"died-{number}")
    if number is not None and comm.size > 1 and comm.number == number and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    digest = hashlib.sha256(flat.numpy().tobytes()).hexdigest()
    return {"models": len(set(comm.gather_objects(digest)))}


def elastic_run(folder: str, averager: str, epochs: int, resume: bool) -> None:
    """Train in this folder, with a row after each step."""
    from dataclasses import replace

    os.chdir(folder)
    config = recipes()["digits"].config
    options = {"elastic": True, "workers": 3, "log_every": 1, "name": "run", "averager": averager, "timeout": 60.0}
    train(replace(config, **options, epochs=epochs, resume=resume), callbacks=[] if resume else [dying])
