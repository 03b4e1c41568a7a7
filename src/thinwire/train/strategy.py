"""Which strategy an averager calls for: the one place where its kind decides."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ..average import Pairwise
from ..average.gossip_base import Gossip
from ..parallel import AsynchronousGossip, GradientCompression, ParameterGossip, compress_gradients, gossip_parameters
from .config import RunConfig


@dataclass(frozen=True)
class Strategy:
    """An averager at work, and what follows from it for the rest of the run.

    Args:
        handle: what `compress_gradients` or `gossip_parameters` returned.
        models_differ: whether every worker has a model of its own.
        phases_in_step: which phases of `handle.seconds` lie within the time of a training step, not beside it.
    """

    handle: GradientCompression | ParameterGossip | AsynchronousGossip
    models_differ: bool
    phases_in_step: tuple[str, ...]


def attach(config: RunConfig, model: nn.Module, optimizer: torch.optim.Optimizer) -> Strategy:
    """Attach the configuration's averager to model and optimizer; all workers call this together."""
    averager = config.parsed_averager()
    if isinstance(averager, Pairwise):
        return Strategy(gossip_parameters(model, optimizer, averager, seed=config.seed), True, ("publish",))
    if not isinstance(averager, Gossip):
        phases = ("compensate", "encode", "exchange", "blocked")
        return Strategy(compress_gradients(model, averager, seed=config.seed), False, phases)
    options = {"overlap": config.overlap, "staleness": config.staleness, "order": config.order, "seed": config.seed}
    handle = gossip_parameters(model, optimizer, averager, **options)
    return Strategy(handle, True, ("encode",) if config.overlap else ("encode", "wait", "decode"))
