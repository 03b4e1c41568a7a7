"""The contract between models and the training loop.

A model is a frozen configuration whose `build(num_classes)` makes an ordinary `nn.Module`. The data set determines the number
of classes (or vocabulary entries); the default is the published number. The module maps the inputs of a batch to scores of
shape (..., num_classes), one row per label. A recurrent module takes its state as one more argument, None at the start, and
returns `(scores, state)`; `apply` handles both kinds. As in other modules, weights come from PyTorch's global generator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn


class Model(ABC):
    """A model's configuration: frozen, printable, equal by value."""

    @abstractmethod
    def build(self, num_classes: int) -> nn.Module:
        """The network with random weights; it computes `num_classes` scores for each label."""


def apply(module: nn.Module, inputs: tuple[Tensor, ...], state: Any = None) -> tuple[Tensor, Any]:
    """Scores of a batch, and the state that the next batch continues from (None where there is none).

    Example:
        >>> import torch
        >>> from thinwire.lab.train.models import LSTMLanguageModel
        >>> module = LSTMLanguageModel(width=8, layers=1).build(num_classes=5)
        >>> scores, state = apply(module, (torch.zeros(2, 3, dtype=torch.int64),))
        >>> scores.shape, apply(nn.ReLU(), (torch.ones(2),))[1]
        (torch.Size([2, 3, 5]), None)
    """
    output = module(*inputs) if state is None else module(*inputs, state)
    return output if isinstance(output, tuple) else (output, None)


def num_parameters(module: nn.Module) -> int:
    """The number of trainable parameters of a module; shared ones count once."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
