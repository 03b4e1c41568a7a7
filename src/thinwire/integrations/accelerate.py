"""Accelerate: one call after `Accelerator.prepare`. Needs the package `accelerate`."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..algorithm import require
from ..average import Averager
from ..strategy import Attachment, GradientCompression, compress_gradients
from . import trainer_package
from .numbers import numbers, summary
from .state import AllWorkersState

with trainer_package("accelerate"):
    from accelerate import Accelerator


def attach(accelerator: Accelerator, model: nn.Module, averager: Averager, **options: Any) -> GradientCompression:
    """Average the gradients of a prepared model, and keep the memory of all workers in `accelerator.save_state`.

    Args:
        accelerator: the one that prepared the model.
        model: what `accelerator.prepare` returned: a model in DDP.
        averager: such as `Mean(TopK(0.01), ErrorFeedback())`.
        options: further arguments of `compress_gradients`.

    Returns:
        The strategy; `log` shows what it counts.

    Raises:
        ValueError: there is one process only, or the model is sharded.

    Example:
        >>> from thinwire.integrations.accelerate import attach
        >>> # model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        >>> # handle = attach(accelerator, model, tw.Mean(tw.QSGD(bits=4)))
    """
    require(
        accelerator.num_processes > 1,
        "attach: there is one process, and nothing to average; start several with torchrun --nproc-per-node N, or on GPUs with "
        "accelerate launch --multi_gpu; accelerate launch --cpu starts one",
    )
    handle = compress_gradients(model, averager, scaler=accelerator.scaler, **options)
    # Accelerate calls `state_dict` on all workers, and writes what one of them returns.
    accelerator.register_for_checkpointing(AllWorkersState(handle))
    return handle


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
