"""Level sets: increasing float64 vectors from -1 to 1, to which coordinates divided by their bucket's norm are rounded."""

from __future__ import annotations

import torch
from torch import Tensor

from .distributions import TruncatedNormalMixture


def equidistant(num_levels: int) -> Tensor:
    """Equidistant numbers from -1 to 1, exactly symmetric."""
    # Integers first: they are symmetric, and division rounds both signs alike.
    return torch.arange(1 - num_levels, num_levels, 2, dtype=torch.float64, device="cpu") / (num_levels - 1)


def exponential_levels(bits: int, multiplier: float | Tensor = 0.5, zero: bool = False) -> Tensor:
    """Levels `+-p^j`: `j = 0..2^(bits-1)-1` without zero, one fewer and 0 itself with it, `p = multiplier` in (0, 1).

    Without zero, symmetric sets use every code, as in adaptive quantization (arXiv 2010.12460). With zero, small
    coordinates may be rounded to zero, which suits entropy coding; with p = 1/2 these are the levels of NUQSGD (arXiv
    1908.06077).

    Args:
        bits: of a code; 1 or more, 2 or more with zero.
        multiplier: p; a number, or a tensor `[...]` for level sets `[..., num_levels]`.
        zero: whether zero is a level.

    Example:
        >>> exponential_levels(2).tolist(), exponential_levels(3, zero=True).tolist()
        ([-1.0, -0.5, 0.5, 1.0], [-1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0])
    """
    base = torch.as_tensor(multiplier, dtype=torch.float64, device="cpu")
    return mirror(powers_of(base, 2 ** (bits - 1) - zero), zero)


def fixed_multiplier(dist: TruncatedNormalMixture, bits: int, zero: bool = False) -> float:
    """The p in 0.01, 0.02, ..., 0.99 of least variance for levels `+-p^j`; this coarse grid gives all machines the same p.

    Example:
        >>> from thinwire.codec.adaptive.statistics import prior
        >>> fixed_multiplier(prior(25, "l2"), bits=3)
        0.43
    """
    candidates = torch.arange(1, 100, dtype=torch.float64, device="cpu") / 100
    return candidates[torch.argmin(dist.quantization_variance(exponential_levels(bits, candidates, zero)))].item()


def powers_of(multiplier: Tensor, count: int) -> Tensor:
    """`p^(count-1), ..., p, 1` along a new last axis."""
    return multiplier.unsqueeze(-1) ** torch.arange(count - 1, -1, -1, dtype=torch.float64, device="cpu")


def mirror(positive: Tensor, zero: bool) -> Tensor:
    """The symmetric set of these positive levels, with zero in the middle if `zero`."""
    middle = [torch.zeros_like(positive[..., :1])] if zero else []
    return torch.cat([-positive.flip(-1), *middle, positive], dim=-1)


def half(levels: Tensor) -> Tensor:
    """Zero and the positive levels of symmetric sets."""
    positive = levels[..., (levels.shape[-1] + 1) // 2 :]
    return torch.cat([torch.zeros_like(positive[..., :1]), positive], dim=-1)
