"""A run that comes no further than a checkpoint, for tests that kill it before its end."""

from __future__ import annotations

import os
from pathlib import Path

from thinwire.lab.files import write_json
from thinwire.lab.train import RunConfig


def held_at(folder: Path, step: int) -> Path:
    """Let a run with `--resume` in this folder, which must not exist, wait in the checkpoint of a step.

    Returns:
        A pipe that nobody reads, in place of a file of the checkpoint. Without it a run that begins again comes to its end.
    """
    pipe = folder / "checkpoints" / f".step-{step:06d}" / "shared.pt"
    pipe.parent.mkdir(parents=True)
    os.mkfifo(pipe)
    write_json(folder / "config.json", RunConfig("digits").as_dict())
    return pipe
