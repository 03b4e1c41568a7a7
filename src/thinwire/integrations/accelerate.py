"""Accelerate: one call after `Accelerator.prepare`. Needs the package `accelerate`."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from torch import nn

from ..algorithm import require
from ..average import Averager
from ..strategy import GradientCompression, compress_gradients
from .state import AllWorkersState


def attach(accelerator: Accelerator, model: nn.Module, averager: Averager, **options: Any) -> GradientCompression:
    """Average the gradients of a prepared model, and keep the memory of all workers in `accelerator.save_state`.

    Args:
        accelerator: that prepared the model.
        model: what `accelerator.prepare` returned: a model in DDP.
        averager: such as `Mean(TopK(0.01), ErrorFeedback())`.
        options: further arguments of `compress_gradients`.

    Returns:
        The strategy. `numbers(strategy)` of `thinwire.integrations.numbers` is ready for `accelerator.log`.

    Raises:
        ValueError: there is one process only, or the model is sharded.

    Example:
        >>> from thinwire.integrations.accelerate import attach
        >>> # model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        >>> # handle = attach(accelerator, model, tw.Mean(tw.QSGD(bits=4)))
    """
    require(
        accelerator.num_processes > 1,
        "attach: there is one process, and nothing to average; start the script with torchrun or accelerate launch",
    )
    handle = compress_gradients(model, averager, scaler=accelerator.scaler, **options)
    accelerator.register_for_checkpointing(AllWorkersState(handle))
    return handle
