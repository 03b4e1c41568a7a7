"""The training loss: a frozen dataclass that compares scores with labels.

A task whose labels are no classes has a `Loss` of its own, and a data set with metrics of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from ...options import require_number
from .data import IGNORE


class Loss(ABC):
    """A loss's configuration: frozen, printable, equal by value."""

    @abstractmethod
    def __call__(self, scores: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of a batch, a scalar. Scores are what the module returns, labels those of the `Batch`."""


@dataclass(frozen=True)
class CrossEntropy(Loss):
    """Cross-entropy in nats with label smoothing: a share e of each label is spread over all C classes.

        loss = -(1 - e) log p[label] - (e / C) sum_c log p[c]

    averaged over the labels that count. Rows of metrics have the loss without smoothing, in training and test alike.

    Raises:
        ValueError: smoothing outside [0, 1).

    Source: Szegedy et al. 2016, arXiv 1512.00567; 0.1 for the Transformer, Vaswani et al. 2017, arXiv 1706.03762.

    Example:
        >>> import torch
        >>> scores, labels = torch.zeros(2, 3, 4), torch.tensor([[0, 1, IGNORE], [3, IGNORE, IGNORE]])
        >>> round(CrossEntropy(0.1)(scores, labels).exp().item(), 4)
        4.0
    """

    label_smoothing: float = 0.0
    """Share e of each label that is spread over all classes; higher => less confident answers. 0.1 is usual."""

    def __post_init__(self):
        require_number("loss.label_smoothing", self.label_smoothing, least=0, below=1)

    def __call__(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Loss of scores (..., C) against labels (...). Labels that are IGNORE do not count."""
        scores, labels = scores.flatten(0, -2), labels.flatten()
        return F.cross_entropy(scores, labels, ignore_index=IGNORE, label_smoothing=self.label_smoothing)
