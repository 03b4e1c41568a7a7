"""Accelerate: one call after `Accelerator.prepare`. Needs the package `accelerate`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .. import attaching
from ..algorithm import require
from ..strategy import Attachment, AveragerAttachment
from ..strategy.strategy import Averaging
from . import averaging, is_alone, trainer_package
from .numbers import numbers, summary
from .state import AllWorkersState

with trainer_package("accelerate"):
    from accelerate import Accelerator
    from accelerate.utils import DistributedType, save_fsdp_model


def attach(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Averaging[Any] | str,
    **options: Any,
) -> AveragerAttachment:
    """Set a strategy to work on a prepared model, and keep what each worker has for itself in `accelerator.save_state`.

    Where each worker has a model of its own, `save_state` saves the mean of all as the model, and beside it all workers'
    models and optimizers, so that `load_state` goes on bit for bit. Where a model gets another strategy once the first is
    detached, only the last one's state is saved and loaded.

    Args:
        accelerator: the one that prepared the model.
        model, optimizer: what `accelerator.prepare` returned: a model in DDP, and its optimizer.
        strategy: such as `Gradients(Mean(TopK(0.01), ErrorFeedback()))`, or its notation.
        options: further arguments of `thinwire.attach`.

    Returns:
        The strategy at work; `log` shows what it counts.

    Raises:
        ValueError: there is one process only, or the strategy does not suit the model.

    Example:
        >>> from thinwire.integrations.accelerate import attach
        >>> # model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        >>> # handle = attach(accelerator, model, optimizer, tw.Gradients(tw.Mean(tw.QSGD(bits=4))))
    """
    require(
        not is_alone(accelerator.num_processes, options),
        "attach: there is one process, and nothing to average; start several with torchrun --nproc-per-node N, or on GPUs with "
        "accelerate launch --multi_gpu; accelerate launch --cpu starts one",
    )
    handle: AveragerAttachment = attaching.attach(
        model, optimizer, averaging(strategy, together=False), scaler=accelerator.scaler, **options
    )
    # Accelerate calls `state_dict` on all workers, and writes what one of them returns.
    state = AllWorkersState(handle, model, [optimizer])
    _register(accelerator, state)
    if handle.models_differ:

        def save_mean(models: list[nn.Module], weights: list[dict[str, Any]], folder: str) -> None:
            if handle.is_detached:  # the model is the mean
                return
            (place,) = (i for i, one in enumerate(models) if one in (model, state.model))
            if accelerator.distributed_type != DistributedType.FSDP:
                weights[place] = state.mean_model()
                return
            with handle.average_model():  # Accelerate has written this worker's shards before it calls its hooks
                save_fsdp_model(accelerator.state.fsdp_plugin, accelerator, models[place], folder, place)

        accelerator.register_save_state_pre_hook(save_mean)
    return handle


def _register(accelerator: Accelerator, state: AllWorkersState) -> None:
    """Let the accelerator save and load a state, in the place of a strategy's that was attached to this model before."""
    registered = accelerator._custom_objects
    for i, other in enumerate(registered):
        if isinstance(other, AllWorkersState) and other.model is state.model:
            registered[i] = state
            return
    accelerator.register_for_checkpointing(state)


def log(accelerator: Accelerator, strategy: Attachment, values: dict[str, Any], step: int, bar: Any = None) -> None:
    """Log `values`, with bytes and waiting time beside them, to the accelerator's trackers, and show them in a progress bar.

    Args:
        accelerator: has the trackers; it needs `log_with=...` and `init_trackers`.
        strategy: what `attach` returned.
        values: such as the loss.
        step: the number of the training step.
        bar: a progress bar of tqdm, such as `accelerate.utils.tqdm` makes; None for none.
    """
    accelerator.log(values | numbers(strategy), step=step)
    if bar is not None:
        bar.set_postfix_str(summary(strategy))
