"""Thin adapters for the trainers people use. Each module needs its trainer's package, and nothing else does.

    lightning       a Lightning callback
    transformers    a callback for the Trainer of Transformers
    accelerate      a call after `Accelerator.prepare`
    state           the state of a worker, or of all as one object, for the trainer's checkpoints
    elastic         the state of a worker of an elastic run, and what those that join take over

An adapter attaches any strategy with an averager when the trainer has wrapped its model in DDP, saves what each worker has
for itself in the trainer's checkpoints, and shows bytes and waiting time in the trainer's own log. Where each worker has a
model of its own, the trainer saves and evaluates the mean of all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..algorithm import require
from ..attaching import strategy_of
from ..comm import ElasticCommunicator
from ..strategy.strategy import Averaging, Strategy


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


def elastic_of(options: dict[str, Any]) -> ElasticCommunicator | None:
    """The elastic communicator among the options for `thinwire.attach`, if there is one."""
    comm = options.get("comm")
    return comm if isinstance(comm, ElasticCommunicator) else None


def is_alone(num_processes: int, options: dict[str, Any]) -> bool:
    """Whether a trainer has one process, so that there is nothing to average.

    Args:
        num_processes: of the trainer.
        options: for `thinwire.attach`.

    Raises:
        ValueError: it has one, and `comm` among the options connects others.
    """
    require(
        num_processes > 1 or options.get("comm") is None,
        "the trainer has one process, and comm connects others; start them with torchrun, or call thinwire.attach yourself",
    )
    return num_processes == 1


def averaging(strategy: Strategy[Any] | str, together: bool) -> Averaging[Any]:
    """The strategy, read if it is text.

    Args:
        strategy: or its notation.
        together: whether the trainer saves and evaluates on all workers at the same step.

    Raises:
        ValueError: the text cannot be read, the strategy has no averager, or it has a quorum and `together` is asked for.
    """
    found = strategy_of(strategy)
    require(
        isinstance(found, Averaging),
        f"{found} takes no part in the checkpoints of a trainer; where the trainer shards the model, call "
        "thinwire.compress_shards(model) after that instead",
    )
    assert isinstance(found, Averaging)
    require(
        not (together and found.counts_commits),
        f"{found}: the trainer saves and evaluates on all workers together, and with a quorum they are at different steps; "
        "leave the quorum out",
    )
    return found
