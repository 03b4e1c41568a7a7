"""The geometric median: the point with the smallest sum of distances to the messages."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ...options import require_integer, require_number
from .base import Combined, Messages, Rule, gram, weighted_sum


@dataclass(frozen=True, repr=False)
class GeometricMedian(Rule):
    """RFA: a few steps of the smoothed Weiszfeld algorithm towards the geometric median of the messages.

    Equation: `z <- sum_i (x_i / d_i) / sum_i (1 / d_i)`, `d_i = max(|x_i - z|, nu)`, from `z = 0`. It bears wrong workers as
    long as they are fewer than half. Every z is a weighted mean of the messages, so that one pass over them, for the products
    of any two, gives the weights of all iterations.

    Args:
        iterations: T.
        nu: distances below it count as `nu`, in the units of what is averaged. Where all are below, the result is the mean:
            choose it well below the distances between honest workers.
        patience: as of `Rule`.

    Raises:
        ValueError: iterations is not a positive integer, or nu is not positive.

    Source: Pillutla et al. 2019, Robust Aggregation for Federated Learning, arXiv 1912.13445; defaults of epfml's code.

    Example:
        >>> import torch, thinwire as tw
        >>> from thinwire.average.robust.base import Messages
        >>> rule = tw.average.GeometricMedian(iterations=100, nu=1e-6)
        >>> rule.combine(Messages(torch.tensor([[1.0], [2.0], [100.0]]), numels=[1])).result
        tensor([2.])
    """

    iterations: int = 8
    nu: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_integer("GeometricMedian: iterations", self.iterations, 1)
        require_number("GeometricMedian: nu", self.nu, above=0)

    def combine(self, messages: Messages) -> Combined:
        products = gram(messages.rows)
        squares = products.diagonal()
        weights = torch.zeros_like(squares)
        for _ in range(self.iterations):
            towards = weighted_sum(products, weights)  # <x_i, z>
            squared = squares - 2 * towards + _total(weights * towards)
            # Rounding may leave a square just below zero.
            inverse = 1 / squared.clamp(min=0).sqrt().clamp(min=self.nu)
            weights = inverse / _total(inverse)
        return Combined(weighted_sum(messages.rows, weights))


def _total(vector: torch.Tensor) -> float:
    # `fsum` rounds once, so the order of the sum does not matter and all workers get the same bits.
    return math.fsum(vector.tolist())
