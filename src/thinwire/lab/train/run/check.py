"""Check a configuration without its data: build what training would build, on a network of two tensors."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from torch import nn

from ....algorithm import require
from ....comm import Communicator, LocalWorld
from ....strategy import AveragerAttachment, Local
from ..config import RunConfig
from ..results.trackers import check_installed
from ..shared_errors import SharedError
from ..step.training import check_optimizer

MOST_WORKERS = 64  # each is a thread here, and talks to all others; these take half a second


def check_first(config: RunConfig, comm: Communicator) -> None:
    """Let rank 0 check that the strategy suits the run's number of workers, before they load data. All workers call it.

    Raises:
        SharedError: on all workers, where it does not. In elastic runs the number changes, so nothing is checked.
    """
    if comm.is_elastic:
        return
    mistake = None
    if comm.rank == 0 and comm.size <= MOST_WORKERS:
        try:
            # Optimizers of the user's own may need the real model.
            _check_strategy(config, lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
        except ValueError as error:
            mistake = str(error)
    mistake = comm.gather_objects(mistake)[0]
    if mistake is not None:
        raise SharedError(mistake)


def check_without_data(config: RunConfig) -> None:
    """Build optimizer and strategy for the run's number of workers, as threads.

    Raises:
        ValueError: they do not go together, as training would find minutes later.
    """
    _check(replace(config, seed=0))


@cache
def _check(config: RunConfig) -> None:
    check_installed(config)
    check_optimizer(config)
    optimizer = replace(config.optimizer, undecayed=("vectors",))  # only the real model has the names
    _check_strategy(config, optimizer.build)


def _check_strategy(config: RunConfig, build: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    strategy = config.parsed_strategy()
    if strategy.averager.traits.needs_names:
        return  # only the real model has them, and the layers of fragments
    if isinstance(strategy, Local):
        strategy = replace(strategy, fragments=1)

    def worker(comm: Communicator) -> None:
        model = nn.Linear(4, 4)
        attachment = strategy.attach(model, build(model), comm=comm)
        require(
            isinstance(attachment, AveragerAttachment),
            f"{type(strategy).__name__} attaches a {type(attachment).__name__}, and a run needs one derived from "
            "thinwire.strategy.OwnModelAttachment or AveragerAttachment",
        )
        attachment.detach()

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the training gives its advice itself
            LocalWorld(config.workers).run(worker)
    except ValueError as error:
        raise ValueError(re.sub(r"^rank \d+: ", "", str(error))) from None  # the same on all of them
