"""Which strategy an averager calls for: the one place where its kind decides."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import nn

from ...average import Pairwise
from ...average.gossip_base import Gossip
from ...comm import Communicator, ProcessGroupCommunicator
from ...strategy import AsynchronousGossip, GradientCompression, ParameterGossip, compress_gradients, gossip_parameters
from .config import RunConfig


@dataclass(frozen=True)
class Strategy:
    """An averager at work, and what follows from it for the rest of the run.

    Args:
        handle: what `compress_gradients` or `gossip_parameters` returned.
        models_differ: whether every worker has a model of its own.
        phases_in_step: which phases of `handle.seconds` lie within the time of a training step, not beside it.
        in_rounds: whether workers keep step with each other.
        own_comm: the averager's communicator, where `attach` has opened it.
    """

    handle: GradientCompression | ParameterGossip | AsynchronousGossip
    models_differ: bool
    phases_in_step: tuple[str, ...]
    in_rounds: bool = True
    own_comm: Communicator | None = None

    def detach(self) -> None:
        """Detach the averager, and close the communicator that was opened for it."""
        self.handle.detach()
        if self.own_comm is not None:
            self.own_comm.close()

    def accumulating(self) -> AbstractContextManager:
        """Context of a backward pass after which another of the same step follows."""
        return self.handle.no_sync() if isinstance(self.handle, GradientCompression) else nullcontext()

    def absorb(self) -> None:
        """Let messages in flight come into the model; workers without rounds have always some. All call this together."""
        if isinstance(self.handle, ParameterGossip):
            self.handle.synchronize()


def attach(
    config: RunConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None = None,
    comm: Communicator | None = None,
) -> Strategy:
    """Attach the configuration's averager to model and optimizer; all workers call this together.

    Args:
        config: of the run.
        model: whose gradients or parameters are averaged.
        optimizer: that updates the model.
        scaler: of the loss, where it is scaled.
        comm: connects the workers; None opens one over the default process group, with the run's time limit.

    Raises:
        ValueError: averager, optimizer and options do not go together.
    """
    own_comm = ProcessGroupCommunicator(timeout_seconds=config.timeout) if comm is None else None
    try:
        return replace(_attached(config, model, optimizer, scaler, comm or own_comm), own_comm=own_comm)
    except BaseException:
        if own_comm is not None:
            own_comm.close()
        raise


def _attached(
    config: RunConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    comm: Communicator,
) -> Strategy:
    averager, shared = config.parsed_averager(), {"seed": config.seed, "scaler": scaler, "comm": comm}
    if isinstance(averager, Pairwise):
        return Strategy(gossip_parameters(model, optimizer, averager, **shared), True, ("publish",), False)
    if not isinstance(averager, Gossip):
        handle = compress_gradients(model, averager, **shared)
        handle.check_optimizer(optimizer)
        return Strategy(handle, False, ("compensate", "encode", "exchange", "blocked"))
    options = {"overlap": config.overlap, "staleness": config.staleness, "order": config.order}
    handle = gossip_parameters(model, optimizer, averager, **options, **shared)
    return Strategy(handle, True, ("encode",) if config.overlap else ("encode", "wait", "decode"))
