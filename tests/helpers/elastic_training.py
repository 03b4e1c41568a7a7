"""An elastic training run in which two workers kill themselves; for tests."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from pathlib import Path

import torch

from thinwire.lab.recipes import recipes
from thinwire.lab.train import train

DYING = ((2, 2), (0, 8))  # workers, and the step after which each dies once, when all three are there


def dying(model, row, comm):
    """A callback: workers die one after the other; else it counts how many different models there are."""
    for number, step in DYING if comm.size == 3 else ():
        died = Path(f"died-{number}")
        if not died.exists() and row["step"] >= step:
            if comm.number == number:
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            break
    if comm.size == 2:  # let the third come, on a loaded machine too
        time.sleep(0.3)
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
