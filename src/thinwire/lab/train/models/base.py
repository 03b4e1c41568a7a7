"""The contract between models and the training loop.

A model is a frozen configuration whose `build(num_classes)` makes an ordinary `nn.Module`. The data set determines the number
of classes (or vocabulary entries); the default is the published number. The module maps the inputs of a batch to scores, one
tensor: for classes of shape (..., num_classes), one row per label. A recurrent module takes its state as one more argument,
None at the start, and returns `(scores, state)`; `apply` handles both kinds. Only data that are `in_order` carry the state from
batch to batch. As in other modules, weights come from PyTorch's global generator.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, cast

from torch import Tensor, nn

from ....algorithm import require


class Model(ABC):
    """A model's configuration: frozen, printable, equal by value."""

    @abstractmethod
    def build(self, num_classes: int) -> nn.Module:
        """The network with random weights; it computes `num_classes` scores for each label."""


def apply(module: nn.Module, inputs: tuple[Tensor, ...], state: Any = None) -> tuple[Tensor, Any]:
    """Scores of a batch, and the state that the next batch continues from (None where there is none).

    Raises:
        ValueError: the module returns something else.

    Example:
        >>> import torch
        >>> from thinwire.lab.train.models import LSTMLanguageModel
        >>> module = LSTMLanguageModel(width=8, layers=1).build(num_classes=5)
        >>> scores, state = apply(module, (torch.zeros(2, 3, dtype=torch.int64),))
        >>> scores.shape, apply(nn.ReLU(), (torch.ones(2),))[1]
        (torch.Size([2, 3, 5]), None)
    """
    output = module(*inputs) if state is None else module(*inputs, state)
    scores, *states = output if isinstance(output, tuple) else (output,)
    is_right = isinstance(scores, Tensor) and len(states) < 2
    found = f"a tuple of {len(output)}" if isinstance(output, tuple) else f"a {type(output).__name__}"
    require(is_right, f"the model must return scores, a tensor, or (scores, state) if it is recurrent; got {found}")
    return scores, next(iter(states), None)


@contextmanager
def within_memory(model: Model) -> Iterator[None]:
    """Context in which a model is built.

    Raises:
        ValueError: it is too large for the memory.

    Example:
        >>> from thinwire.lab.train.models import DigitsNet
        >>> with within_memory(model := DigitsNet(width=10**12)):
        ...     model.build(10)
        Traceback (most recent call last):
        ValueError: a model of model.width 1000000000000 does not fit into memory; lower it
    """
    try:
        yield
    except (RuntimeError, TypeError, MemoryError) as error:
        # PyTorch has no class of its own for "Storage size calculation overflowed" and "can't allocate memory".
        if not isinstance(error, MemoryError) and not re.search(
            r"overflow|allocate memory|out of memory", str(error), re.I
        ):
            raise
        values = [(one.name, getattr(model, one.name)) for one in fields(cast(Any, model))]
        sizes = [f"model.{name} {value}" for name, value in values if type(value) is int]
        lower = "lower it" if len(sizes) == 1 else "lower these"
        raise ValueError(f"a model of {', '.join(sizes)} does not fit into memory; {lower}") from None


def num_parameters(module: nn.Module) -> int:
    """The number of trainable parameters of a module; shared ones count once."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
