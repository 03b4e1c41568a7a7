"""Thin adapters for the trainers people use. Each module needs its trainer's package, and nothing else does.

    lightning       a Lightning callback
    transformers    a callback for the Trainer of Transformers
    accelerate      a call after `Accelerator.prepare`
    state           the state of all workers as one object, for trainers that save on one worker alone

An adapter attaches `thinwire.compress_gradients` when the trainer has wrapped its model in DDP, saves the memory of all
workers in the trainer's checkpoints, and shows bytes and waiting time in the trainer's own log.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def trainer_package(name: str) -> Iterator[None]:
    """Import a trainer's package in this block; where it is missing, the error names the extra to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != name:  # it is installed, but cannot be imported
            raise
        raise ModuleNotFoundError(
            f"thinwire.integrations.{name} needs {name}, which is not installed; install it with this, in the folder of "
            "thinwire's sources: pip install '.[trainers]'",
            name=name,
        ) from None
