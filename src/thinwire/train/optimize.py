"""How parameters follow the averaged gradient: the optimizer and its learning-rate schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from ..algorithm import require


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with Nesterov momentum; the learning rate warms up linearly and falls as a cosine."""

    learning_rate: float = 0.05
    """Highest learning rate; higher => faster, until it diverges. Sparse gradients bear less than dense ones."""
    momentum: float = 0.9
    """Share of the last step that is repeated; 0 => plain SGD."""
    weight_decay: float = 5e-4
    """Pull of the weights towards zero; higher => smaller weights."""
    warmup_fraction: float = 0.1
    """Share of the run in which the learning rate rises; higher => a gentler start."""

    def __post_init__(self):
        require(self.learning_rate > 0, f"optimizer.learning_rate must be above 0, got {self.learning_rate}")
        require(0 <= self.momentum < 1, f"optimizer.momentum must be in [0, 1), got {self.momentum}")
        require(self.weight_decay >= 0, f"optimizer.weight_decay must be 0 or more, got {self.weight_decay}")
        fraction = self.warmup_fraction
        require(0 <= fraction <= 1, f"optimizer.warmup_fraction must be in [0, 1], got {fraction}")

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """PyTorch's own SGD over the model's parameters."""
        return torch.optim.SGD(
            model.parameters(),
            lr=self.learning_rate,
            momentum=self.momentum,
            nesterov=self.momentum > 0,
            weight_decay=self.weight_decay,
        )

    def learning_rate_at(self, step: int, num_steps: int) -> float:
        """Learning rate of a step, 0..num_steps-1: up to `learning_rate` in a line, then down to 0 as half a cosine.

        Example:
            >>> sgd = SGD(learning_rate=1.0, warmup_fraction=0.5)
            >>> [round(sgd.learning_rate_at(step, 8), 2) for step in range(8)]
            [0.25, 0.5, 0.75, 1.0, 1.0, 0.85, 0.5, 0.15]
        """
        warmup_steps = round(self.warmup_fraction * num_steps)
        if step < warmup_steps:
            return self.learning_rate * (step + 1) / warmup_steps
        return self.learning_rate * (1 + math.cos(math.pi * (step - warmup_steps) / (num_steps - warmup_steps))) / 2


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Give all parameter groups this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
