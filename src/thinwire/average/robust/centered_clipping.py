"""Centered clipping: clip what differs from the last result."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...options import require_integer, require_number
from .base import Combined, Messages, Rule, clip_factors, norms_of


@dataclass(frozen=True, repr=False)
class CenteredClipping(Rule):
    """Moves the last result v towards the messages, by at most `tau` towards each: `v <- v + 1/k sum_i clip(x_i - v, tau)`.

    `clip(u, tau) = u min(1, tau / |u|)`. v starts at zero, is the same on all workers, and is saved. The rule relies on
    messages that change slowly: give workers momentum, as `MomentumCorrection` does, or average parameter changes.

    Args:
        tau: bound of one worker's pull, in the units of what is averaged. Lower => bounds more, and follows more slowly.
            Choose it near the norm of `x_i - v` between honest workers. Infinity gives the mean.
        iterations: how often the equation is applied in a round.
        patience: as of `Rule`.

    Raises:
        ValueError: tau is not positive, or iterations is not a positive integer.

    Source: Karimireddy et al. 2021, Learning from History for Byzantine Robust Optimization, arXiv 2012.10333. The defaults
    are those of Karimireddy et al. 2022, arXiv 2006.09365.

    Example:
        >>> import torch, thinwire as tw
        >>> from thinwire.average.robust.base import Messages
        >>> messages = Messages(torch.tensor([[1.0], [1.0], [100.0]]), numels=[1], center=torch.zeros(1))
        >>> tw.average.CenteredClipping(tau=1.0, iterations=1).combine(messages).result
        tensor([1.])
    """

    has_center: ClassVar[bool] = True

    tau: float = 10.0
    iterations: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("CenteredClipping: tau", self.tau, above=0, most=math.inf)
        require_integer("CenteredClipping: iterations", self.iterations, 1)

    def combine(self, messages: Messages) -> Combined:
        assert messages.center is not None  # has_center asks for it
        v, (norms, factors) = messages.center, self._factors(messages.rows, messages.center)
        # Workers are judged by their distance to the last result, not to those of later iterations.
        dropped = norms * (1 - factors)
        for iteration in range(self.iterations):
            if iteration > 0:
                _, factors = self._factors(messages.rows, v)
            change = torch.zeros_like(v)
            for row, factor in zip(messages.rows, (factors / len(factors)).tolist(), strict=True):
                change += (row - v) * factor
            v = v + change
        return Combined(v, norms, dropped)

    def _factors(self, rows: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The distance of each row to v, and the factor that clips it."""
        # One row at a time, so that only one difference takes memory.
        distances = torch.cat([norms_of((row - v)[None]) for row in rows])
        return distances, clip_factors(distances, self.tau)
