"""Gradient clipping in `Mean`: encoded gradients before they enter memory, dense ones after averaging.

A sum of many accumulated gradients may explode where a single one does not, so Deep Gradient Compression clips before
it accumulates. A tensor that travels dense is clipped once its mean is known, as in the authors' implementation. Clips see
unscaled gradients, one tensor at a time. An element that is not finite never becomes finite.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor

from ...algorithm import Algorithm
from ...comm import Communicator
from ...options import require_number
from ..base import NamedTensors


class Clip(Algorithm, ABC):
    """A rule that bounds the norm of a gradient, and never enlarges it; its fields are positive.

    With `needs_norms`, it is told the norm over all workers.
    """

    needs_norms: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for bound in fields(self):
            require_number(f"{type(self).__name__}: {bound.name}", getattr(self, bound.name), above=0)

    @abstractmethod
    def apply(self, gradient: Tensor, num_workers: int, norm: float | None = None) -> Tensor:
        """The clipped gradient: a new float32 tensor.

        Args:
            gradient: float tensor of any shape, unscaled.
            num_workers: W, for bounds that depend on it.
            norm: with `needs_norms`, `sqrt(1/W sum_i |g_i|^2)` of this tensor over all workers.
        """


@dataclass(frozen=True, repr=False)
class ClipByNorm(Clip):
    """Scales each tensor's gradient to a norm of at most `max_norm / sqrt(W)`: `g * min(1, max_norm / (sqrt(W) |g|))`.

    With W independent gradients of norm `max_norm / sqrt(W)` their sum has a norm of about `max_norm`.

    Args:
        max_norm: the bound for the sum over all workers; lower => clips more.

    Raises:
        ValueError: max_norm is not positive.

    Source: Lin et al. 2018, Deep Gradient Compression, arXiv 1712.01887, section 3.2.

    Example:
        >>> import torch, thinwire as tw
        >>> tw.average.ClipByNorm(10.0).apply(torch.tensor([6.0, 8.0]), num_workers=4)
        tensor([3., 4.])
    """

    max_norm: float

    def apply(self, gradient: Tensor, num_workers: int, norm: float | None = None) -> Tensor:
        # In float64, squares of float32 values neither overflow nor vanish.
        own = torch.linalg.vector_norm(gradient, dtype=torch.float64)
        factor: Tensor = self.max_norm / math.sqrt(num_workers) / own
        # A norm of zero makes the factor infinite, and the clamp makes it 1.
        return gradient.float() * factor.clamp(max=1.0).float()


@dataclass(frozen=True, repr=False)
class ClipByValue(Clip):
    """Limits every finite element to `[-max_value, max_value]`.

    Args:
        max_value: the bound; lower => clips more.

    Raises:
        ValueError: max_value is not positive.

    Example:
        >>> import torch, thinwire as tw
        >>> tw.average.ClipByValue(1.0).apply(torch.tensor([0.5, -3.0]), num_workers=4)
        tensor([ 0.5000, -1.0000])
    """

    max_value: float

    def apply(self, gradient: Tensor, num_workers: int, norm: float | None = None) -> Tensor:
        return _clamp_finite(gradient, self.max_value)


@dataclass(frozen=True, repr=False)
class ClipValueByGlobalNorm(Clip):
    """Limits every finite element to `factor * sqrt(1/W sum_i |g_i|^2)`, the norm of its tensor over all workers.

    It tames a worker whose gradient is out of proportion to those of the others. The norms of all tensors travel in one
    all-reduce of one float64 each, before anything else is sent; so the whole model's gradients are needed at once, and
    nothing overlaps with the backward pass.

    Args:
        factor: of the norm; lower => clips more.

    Raises:
        ValueError: factor is not positive.

    Source: Lin et al. 2018, Deep Gradient Compression, arXiv 1712.01887, in the authors' implementation.

    Example:
        >>> import torch, thinwire as tw
        >>> tw.average.ClipValueByGlobalNorm().apply(torch.tensor([0.5, -3.0]), num_workers=4, norm=2.0)
        tensor([ 0.5000, -2.0000])
    """

    needs_norms: ClassVar[bool] = True

    factor: float = 1.0

    def apply(self, gradient: Tensor, num_workers: int, norm: float | None = None) -> Tensor:
        assert norm is not None, "the caller gathers norms, which needs_norms asks for"
        return _clamp_finite(gradient, self.factor * norm)


def clip_gradients(clip: Clip, tensors: NamedTensors, comm: Communicator, scale: float) -> NamedTensors:
    """The clipped gradients, new tensors; with `needs_norms` one all-reduce of a float64 for each tensor.

    Args:
        clip: the rule.
        tensors: this worker's gradients, multiplied by the loss scale.
        comm: all workers.
        scale: the loss scale; the rule sees unscaled gradients.
    """
    if not tensors:
        return tensors
    norms: list[float | None] = [None] * len(tensors)
    unscaled = [t.float() / scale for _, t in tensors]
    if clip.needs_norms:
        # In float64, squares of float32 values neither overflow nor vanish.
        squares = [torch.linalg.vector_norm(g, dtype=torch.float64).square() / comm.size for g in unscaled]
        norms = comm.all_reduce(torch.stack(squares)).wait().sqrt().tolist()
    clipped = [clip.apply(g, comm.size, norm) * scale for g, norm in zip(unscaled, norms, strict=True)]
    return [(name, g) for (name, _), g in zip(tensors, clipped, strict=True)]


def clip_means(clip: Clip, means: list[Tensor], num_workers: int, scale: float) -> list[Tensor]:
    """Clipped means of gradients, which are equal on all workers: new tensors, by the rule for one worker's gradient."""
    unscaled = [mean.float() / scale for mean in means]
    norms = [
        float(torch.linalg.vector_norm(mean, dtype=torch.float64)) if clip.needs_norms else None for mean in unscaled
    ]
    return [clip.apply(mean, num_workers, norm) * scale for mean, norm in zip(unscaled, norms, strict=True)]


def _clamp_finite(gradient: Tensor, bound: float) -> Tensor:
    """A bound that is not a number leaves everything as it is."""
    gradient = gradient.float()
    if math.isnan(bound):
        return gradient.clone()
    bound = min(bound, torch.finfo(torch.float32).max)  # PyTorch refuses a finite one that is larger
    return torch.where(gradient.isfinite(), gradient.clamp(-bound, bound), gradient)
