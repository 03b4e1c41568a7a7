"""Clipping by the median norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .base import Combined, Messages, Rule, clip_factors, norms_of, weighted_sum


@dataclass(frozen=True, repr=False)
class MedianNorm(Rule):
    """The mean of messages that are clipped, tensor by tensor, to the median norm of the workers.

    Equation, for each tensor: `1/k sum_i x_i min(1, m / |x_i|)`, m the median of `|x_1| ... |x_k|`, the lower one of two. It
    bounds how far one worker can move the mean, and changes little where all norms are alike. It does not notice a wrong
    direction. Where most workers send zeros of a tensor, it becomes zero.

    Args:
        patience: as of `Rule`.

    Source: the released code of templar, which always applies it before its outer step.

    Example:
        >>> import torch, thinwire as tw
        >>> from thinwire.average.robust.base import Messages
        >>> rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 100.0]])
        >>> tw.average.MedianNorm().combine(Messages(rows, numels=[2])).result
        tensor([0.3333, 0.6667])
    """

    def combine(self, messages: Messages) -> Combined:
        parts, norms, dropped = [], [], []
        for segment in messages.rows.split(messages.numels, -1):
            length = norms_of(segment)
            factors = clip_factors(length, length.sort().values[(len(length) - 1) // 2])
            parts.append(weighted_sum(segment, factors / len(segment)))
            norms.append(length)
            dropped.append(length * (1 - factors))
        whole = [torch.stack(each, -1).square().sum(-1).sqrt() for each in (norms, dropped)]
        return Combined(torch.cat(parts), *whole)
