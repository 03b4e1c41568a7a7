"""Check a configuration without its data: build what training would build, on a network of two tensors."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

from torch import nn

from ....algorithm import require
from ....comm import Communicator, LocalWorld
from ....strategy import AveragerAttachment
from ..config import RunConfig
from ..results.trackers import check_installed
from ..step.training import check_clipping, check_momentum


def check_without_data(config: RunConfig) -> None:
    """Build optimizer and strategy for the run's number of workers, as threads.

    Raises:
        ValueError: they do not go together, as training would find minutes later.
    """
    _check(replace(config, seed=0))


@cache
def _check(config: RunConfig) -> None:
    check_installed(config)
    check_clipping(config)
    check_momentum(config)
    strategy = config.parsed_strategy()
    if strategy.averager.traits.needs_names:
        return  # only the real model has them

    def worker(comm: Communicator) -> None:
        model = nn.Linear(4, 4)
        optimizer = replace(config.optimizer, undecayed=("vectors",))  # only the real model has the names
        attachment = strategy.attach(model, optimizer.build(model), comm=comm)
        require(
            isinstance(attachment, AveragerAttachment),
            f"{type(strategy).__name__} attaches a {type(attachment).__name__}, and a run needs one derived from "
            "thinwire.strategy.OwnModelAttachment or AveragerAttachment",
        )
        attachment.detach()

    try:
        LocalWorld(config.workers).run(worker)
    except ValueError as error:
        raise ValueError(re.sub(r"^rank \d+: ", "", str(error))) from None  # the same on all of them
