"""Level sets: increasing float64 vectors from -1 to 1, to which coordinates divided by their bucket's norm are rounded."""

from __future__ import annotations

import torch
from torch import Tensor

from .distributions import Distribution


def num_levels_of(bits: int, zero: bool) -> int:
    """The number of levels that `bits` bits can name; odd with a level at zero."""
    if bits < 1 + zero:
        raise ValueError(f"expected at least {1 + zero} bits for levels with zero={zero}, got {bits}")
    return int(2**bits) - zero


def equidistant(num_levels: int) -> Tensor:
    """Equidistant numbers from -1 to 1, exactly symmetric."""
    return torch.arange(1 - num_levels, num_levels, 2, dtype=torch.float64, device="cpu") / (num_levels - 1)


def uniform_levels(bits: int, zero: bool = False) -> Tensor:
    """Equidistant levels on [-1, 1]: `2^bits` without zero, `2^bits - 1` with it.

    Without zero, the default, symmetric sets use every code, as in adaptive quantization (arXiv 2010.12460). With zero,
    as in QSGD (arXiv 1610.02132), small coordinates may be rounded to zero, which suits entropy coding.

    Raises:
        ValueError: for bits < 1, or < 2 with zero.

    Example:
        >>> uniform_levels(2).tolist(), uniform_levels(2, zero=True).tolist()
        ([-1.0, -0.3333333333333333, 0.3333333333333333, 1.0], [-1.0, 0.0, 1.0])
    """
    return equidistant(num_levels_of(bits, zero))


def exponential_levels(bits: int, multiplier: float | Tensor = 0.5, zero: bool = False) -> Tensor:
    """Levels `+-p^j`: `j = 0..2^(bits-1)-1` without zero, one fewer and 0 itself with it, `p = multiplier` in (0, 1).

    With zero and p = 1/2 these are the levels of NUQSGD (arXiv 1908.06077).

    Raises:
        ValueError: for bits < 1, or < 2 with zero; for a multiplier outside (0, 1).

    Example:
        >>> exponential_levels(2).tolist(), exponential_levels(3, zero=True).tolist()
        ([-1.0, -0.5, 0.5, 1.0], [-1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0])
    """
    if not 0 < multiplier < 1:
        raise ValueError(f"expected a multiplier between 0 and 1, got {multiplier}")
    base = torch.as_tensor(multiplier, dtype=torch.float64, device="cpu")
    return mirror(powers_of(base, num_levels_of(bits, zero) // 2), zero)


def fixed_multiplier(dist: Distribution, bits: int, zero: bool = False) -> float:
    """The p in 0.01, 0.02, ..., 0.99 of least variance for levels `+-p^j`; this coarse grid gives all machines the same p.

    Example:
        >>> from thinwire.codec import TruncatedNormal
        >>> fixed_multiplier(TruncatedNormal(0.0, 0.2), bits=3)
        0.43
    """
    candidates = torch.arange(1, 100, dtype=torch.float64, device="cpu") / 100
    levels = mirror(powers_of(candidates, num_levels_of(bits, zero) // 2), zero)
    return candidates[torch.argmin(dist.quantization_variance(levels))].item()


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
