"""Choose the strategy of a run by the properties of its averager. No other part of the lab does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from ...average import Averager, Pairwise
from ...comm import Communicator, ProcessGroupCommunicator
from ...strategy import (
    AsynchronousGossip,
    GradientCompression,
    LocalUpdates,
    ParameterGossip,
    compress_gradients,
    gossip_asynchronously,
    gossip_parameters,
    local_updates,
)
from .config import RunConfig


def _nothing() -> None:
    """Absorb nothing."""


@dataclass(frozen=True)
class Strategy:
    """An averager at work, and the facts about it that the rest of the run needs.

    Args:
        handle: what `compress_gradients`, `gossip_parameters`, `gossip_asynchronously` or `local_updates` returned.
        models_differ: whether every worker has a model of its own.
        phases_in_step: which phases of `handle.seconds` lie within the time of a training step, not beside it.
        in_rounds: whether workers keep step with each other.
        accumulating: makes the context of a backward pass after which another one of the same step follows.
        absorb: waits for messages in flight, and adds those of gossip to the model. All workers call it together.
        own_comm: the averager's communicator, where `attach` has opened it.
    """

    handle: GradientCompression | ParameterGossip | AsynchronousGossip | LocalUpdates
    models_differ: bool
    phases_in_step: tuple[str, ...]
    in_rounds: bool = True
    accumulating: Callable[[], AbstractContextManager[Any]] = nullcontext
    absorb: Callable[[], None] = _nothing
    own_comm: Communicator | None = None

    def detach(self) -> None:
        """Detach the averager, and close the communicator that was opened for it."""
        self.handle.detach()
        if self.own_comm is not None:
            self.own_comm.close()


def attach(
    config: RunConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None = None,
    comm: Communicator | None = None,
    bucket_bytes: int | None = None,
) -> Strategy:
    """Attach the configuration's averager to model and optimizer; all workers call this together.

    Args:
        config: of the run.
        model: whose gradients or parameters are averaged.
        optimizer: that updates the model.
        scaler: of the loss, where it is scaled.
        comm: connects the workers; None opens one over the default process group, with the run's time limit.
        bucket_bytes: size of the buckets of gradients; None for the default of `compress_gradients`.

    Raises:
        ValueError: averager, optimizer and options do not go together.
    """
    if comm is not None:
        return _attached(config, model, optimizer, scaler, comm, bucket_bytes)
    own_comm = ProcessGroupCommunicator(timeout_seconds=config.timeout)
    try:
        return replace(_attached(config, model, optimizer, scaler, own_comm, bucket_bytes), own_comm=own_comm)
    except BaseException:
        own_comm.close()
        raise


def _attached(
    config: RunConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    comm: Communicator,
    bucket_bytes: int | None,
) -> Strategy:
    chosen = config.parsed_averager()
    always: dict[str, Any] = {"comm": comm, "on_nonfinite": config.on_nonfinite, "max_nonfinite": config.max_nonfinite}
    shared = always | {"seed": config.seed, "scaler": scaler}
    if not chosen.has_rounds:
        pairwise = cast(Pairwise, chosen)  # all averagers have rounds
        asynchronous = gossip_asynchronously(model, optimizer, pairwise, **always)
        return Strategy(asynchronous, True, ("publish",), in_rounds=False)
    averager = cast(Averager, chosen)
    if config.every is not None:
        local = local_updates(
            model,
            optimizer,
            averager,
            config.every,
            config.parsed_outer(),
            fragments=config.fragments,
            delay=config.delay,
            alpha=config.alpha,
            pull=config.pull,
            **shared,
        )
        averaging = ("blocked",) if config.delay else ("compensate", "encode", "exchange", "wait", "decode")
        return Strategy(local, True, ("measure", "outer", *averaging), absorb=local.settle)
    if averager.gives_one_mean:
        size: dict[str, Any] = {} if bucket_bytes is None else {"bucket_bytes": bucket_bytes}
        gradients = compress_gradients(model, averager, **size, **shared)
        gradients.check_optimizer(optimizer)
        phases = ("compensate", "encode", "exchange", "blocked")
        return Strategy(gradients, False, phases, accumulating=gradients.no_sync)
    gossip = gossip_parameters(
        model,
        optimizer,
        averager,
        overlap=config.overlap,
        staleness=config.staleness,
        order=config.order,
        **shared,
    )
    inside = ("encode",) if config.overlap else ("encode", "wait", "decode")
    return Strategy(gossip, True, inside, absorb=gossip.synchronize)
