"""Clipping by the median norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...options import require_number
from .base import Combined, Messages, Rule, clip_factors, norms_of, weighted_sum


@dataclass(frozen=True, repr=False)
class MedianNorm(Rule):
    """The mean of messages that are clipped, tensor by tensor, to the median norm of the workers.

    Equation, for each tensor: `1/k sum_i x_i min(1, factor m / |x_i|)`, m the median of `|x_1| ... |x_k|`, the lower one of
    two. It bounds how far one worker can move the mean, and changes little where all norms are alike. It does not notice a
    wrong direction. Where most workers send zeros of a tensor, it becomes zero; a worker whose whole message is zero, such as
    one that has just joined, does not count. Messages of fewer than three workers are not clipped.

    Args:
        factor: how many median norms pass. Higher => less is lost of honest messages, a wrong one moves the mean further.
        patience: as of `Rule`.

    Raises:
        ValueError: factor is not a finite number, 1 or more.

    Source: the released code of templar, which always applies it before its outer step, with a factor of 1.

    Example:
        >>> import torch, thinwire as tw
        >>> from thinwire.average.robust.base import Messages
        >>> rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 100.0]])
        >>> tw.average.MedianNorm().combine(Messages(rows, numels=[2])).result
        tensor([0.3333, 0.6667])
    """

    factor: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("MedianNorm: factor", self.factor, least=1)

    def combine(self, messages: Messages) -> Combined:
        factors, norms, dropped = self.factors(messages)
        return Combined(weighted(messages, factors / len(messages.rows)), norms, dropped)

    def factors(self, messages: Messages) -> tuple[Tensor, Tensor, Tensor]:
        """What clipping multiplies each tensor of each row by, (k, tensors); the rows' norms, and those of what it drops, (k).

        All are float64.
        """
        norms = torch.stack([norms_of(segment) for segment in messages.rows.split(messages.numels, -1)], -1)
        counted = norms[norms.any(1)]
        factors = torch.ones_like(norms)
        if len(counted) > 2:
            factors = clip_factors(norms, self.factor * counted.sort(0).values[(len(counted) - 1) // 2])
        return factors, norms.square().sum(-1).sqrt(), (norms * (1 - factors)).square().sum(-1).sqrt()


def weighted(messages: Messages, factors: Tensor) -> Tensor:
    """The sum of the rows, each tensor of each times its factor, (k, tensors)."""
    segments = messages.rows.split(messages.numels, -1)
    return torch.cat([weighted_sum(segment, each) for segment, each in zip(segments, factors.T, strict=True)])
