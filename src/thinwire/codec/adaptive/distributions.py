"""Truncated normal distributions and their mixtures: the model of normalised gradient coordinates.

All formulas are float64 and in closed form. They use `erf` and `exp`, scaled where the plain ones would cancel (see
`gaussian_integrals`). A standard deviation is at least 1e-12 of the half-width of [low, high], which is close to a
point mass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from .gaussian_integrals import IntervalIntegrals, interval_integrals, kernel
from .roots import increasing_root

POINT_MASS = 1e-12
PPF_TOLERANCE = 1e-15  # on F, relative to q


def _float64(value: Tensor | float | list[float]) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64, device="cpu")


def _check_finite(**fields: Tensor) -> None:
    for name, value in fields.items():
        if not torch.isfinite(value).all():
            raise ValueError(f"{name} must be finite, got {value}; drop buckets with infinite or NaN gradients first")


def _check_support(low: float, high: float) -> None:
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"expected finite low < high, got low={low}, high={high}")


def check_levels(levels: Tensor | list[float], low: float, high: float) -> Tensor:
    """Check that levels do not decrease along the last axis and reach from `low` to `high`; return them as float64.

    Raises:
        ValueError: fewer than two levels, a wrong order, or other ends.
    """
    levels = _float64(levels)
    if levels.dim() == 0 or levels.shape[-1] < 2 or not (levels.diff(dim=-1) >= 0).all():
        raise ValueError(f"expected at least two levels in increasing order, got {levels.tolist()}")
    if not ((levels[..., 0] == low).all() and (levels[..., -1] == high).all()):
        raise ValueError(f"expected levels from {low} to {high}, the distribution's support, got {levels.tolist()}")
    return levels


@dataclass(frozen=True, eq=False, init=False)
class TruncatedNormal:
    r"""A normal distribution cut off to `[low, high]` and renormalised.

    `f(r) = exp(-(r-mean)^2/(2 std^2)) / Z` on [low, high], with Z such that f integrates to 1.

    Args:
        mean, std: mean and standard deviation before truncation; numbers or float64 tensors that broadcast (a batch
            of distributions). `std >= 0`; the mean may lie outside [low, high].
        low, high: lower and upper end of the support.

    Raises:
        ValueError: for a negative std, non-finite parameters or an empty support.

    Example:
        >>> dist = TruncatedNormal(0.0, 0.5)
        >>> round(dist.cdf(0.0).item(), 12), round(dist.ppf(0.5).item(), 12)
        (0.5, 0.0)
        >>> round(dist.quantization_variance([-1.0, 0.0, 1.0]).item(), 6)
        0.16796
    """

    mean: Tensor
    std: Tensor
    low: float
    high: float

    def __init__(self, mean: Tensor | float, std: Tensor | float, low: float = -1.0, high: float = 1.0) -> None:
        means, stds = torch.broadcast_tensors(_float64(mean), _float64(std))
        _check_finite(mean=means, std=stds)
        _check_support(low, high)
        if (stds < 0).any():
            raise ValueError(f"std must not be negative, got {stds}")
        stds = stds.clamp(min=POINT_MASS * (high - low) / 2)
        for name, value in (("mean", means), ("std", stds), ("low", low), ("high", high)):
            object.__setattr__(self, name, value)

    @property
    def parameters(self) -> tuple[Tensor, Tensor, Tensor]:
        """Weights, means and standard deviations `[K]` as of a mixture: here K = 1.

        Raises:
            ValueError: for a batch of distributions.
        """
        if self.mean.numel() != 1:
            raise ValueError(f"expected one distribution, got a batch of shape {tuple(self.mean.shape)}; use a mixture")
        return torch.ones(1, dtype=torch.float64, device="cpu"), self.mean.reshape(1), self.std.reshape(1)

    @cached_property
    def anchor(self) -> Tensor:
        """The mode: the point of [low, high] nearest to the mean."""
        return self.mean.clamp(self.low, self.high)

    @cached_property
    def mass(self) -> Tensor:
        """The normalising integral over [low, high], relative to the density's value at the mode."""
        return self._integrals(_float64(self.low), _float64(self.high)).mass

    def _integrals(self, a: Tensor, b: Tensor) -> IntervalIntegrals:
        return interval_integrals(a, b, self.mean, self.std, self.anchor)

    def pdf(self, r: Tensor | float) -> Tensor:
        """The density at r (broadcasts with mean and std); 0 outside the support."""
        r = _float64(r)
        inside = (r >= self.low) & (r <= self.high)
        clamped = r.clamp(self.low, self.high)
        return torch.where(inside, kernel(clamped, self.mean, self.std, self.anchor) / self.mass, 0)

    def cdf(self, r: Tensor | float) -> Tensor:
        """`F(r) = integral_low^r f`; broadcasts with mean and std."""
        r = _float64(r).clamp(self.low, self.high)
        return (self._integrals(_float64(self.low), r).mass / self.mass).clamp(max=1)

    def ppf(self, q: Tensor | float) -> Tensor:
        """The quantile `F^-1(q)`, `0 <= q <= 1`; broadcasts with mean and std. ValueError for other q."""
        probability, mean, std = torch.broadcast_tensors(_check_probability(q), self.mean, self.std)
        below, above = (torch.special.ndtr((end - mean) / std) for end in (self.low, self.high))
        guess = mean + std * torch.special.ndtri(below + probability * (above - below))
        return _quantile(self, probability, guess)

    def partial_moments(self, a: Tensor | float, b: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
        """`integral_a^b r^n f(r) dr` for n = 0, 1, 2; a <= b within the support; broadcasts with mean and std."""
        a, b = (_float64(end).clamp(self.low, self.high) for end in (a, b))
        mass, first, spread = (integral / self.mass for integral in self._integrals(a, b))
        return mass, a * mass + first, a * a * mass + (a + b) * first - spread

    def quantization_variance(self, levels: Tensor | list[float]) -> Tensor:
        r"""Expected squared error of unbiased stochastic rounding to `levels`.

        `Psi(l) = sum_j integral over [l_j, l_{j+1}] of (l_{j+1}-r)(r-l_j) f(r) dr` (Faghri et al., "Adaptive Gradient
        Quantization for Data-Parallel SGD", arXiv 2010.12460).

        Args:
            levels: `[..., num_levels]`, non-decreasing from low to high.

        Returns:
            Psi, of the shape of `levels` without its last axis, broadcast with mean and std. Relative error: 1e-10.

        Raises:
            ValueError: if the levels are not in order or do not span the support exactly.
        """
        levels = check_levels(levels, self.low, self.high)
        mean, std, anchor = (t.unsqueeze(-1) for t in (self.mean, self.std, self.anchor))
        spread = interval_integrals(levels[..., :-1], levels[..., 1:], mean, std, anchor).spread
        return spread.sum(dim=-1) / self.mass


@dataclass(frozen=True, eq=False, init=False)
class TruncatedNormalMixture:
    """`f(r) = sum_k weights_k f_k(r)` with truncated normals `f_k` on one support.

    Args:
        weights: `[K]`, not negative, not all zero; they are scaled to sum to 1. Components of zero weight are dropped.
        means, stds: `[K]`, as in `TruncatedNormal`.
        low, high: the support.

    Raises:
        ValueError: for shapes that differ, negative or non-finite weights, weights that are all zero, or a mean,
            std or support that `TruncatedNormal` rejects.

    Example:
        >>> mixture = TruncatedNormalMixture([3.0, 1.0], [0.0, 0.1], [0.2, 0.05])
        >>> mixture.weights.tolist()
        [0.75, 0.25]
        >>> round(mixture.cdf(mixture.ppf(0.3)).item(), 12)
        0.3
    """

    weights: Tensor
    means: Tensor
    stds: Tensor
    low: float
    high: float
    components: TruncatedNormal = field(repr=False)  # all of them as one batch

    def __init__(
        self,
        weights: Tensor | list[float],
        means: Tensor | list[float],
        stds: Tensor | list[float],
        low: float = -1.0,
        high: float = 1.0,
    ) -> None:
        weights, means, stds = (_float64(t) for t in (weights, means, stds))
        if weights.dim() != 1 or not weights.shape == means.shape == stds.shape:
            shapes = tuple(tuple(t.shape) for t in (weights, means, stds))
            raise ValueError(f"weights, means and stds must be vectors of one length, got shapes {shapes}")
        _check_finite(weights=weights)
        if (weights < 0).any() or not (weights > 0).any():
            raise ValueError(f"weights must not be negative and not all zero, got {weights.tolist()}")
        kept = weights > 0
        weights = weights[kept] / weights.max()  # first by the largest, so that the sum cannot overflow
        for name, value in (("weights", weights / weights.sum()), ("means", means[kept]), ("stds", stds[kept])):
            object.__setattr__(self, name, value)
        for name, end in (("low", low), ("high", high)):
            object.__setattr__(self, name, end)
        object.__setattr__(self, "components", TruncatedNormal(self.means, self.stds, low, high))

    @property
    def parameters(self) -> tuple[Tensor, Tensor, Tensor]:
        """Weights, means and standard deviations, `[K]` each."""
        return self.weights, self.means, self.components.std

    def pdf(self, r: Tensor | float) -> Tensor:
        """The density at r, elementwise; 0 outside the support."""
        return self.components.pdf(_float64(r).unsqueeze(-1)) @ self.weights

    def cdf(self, r: Tensor | float) -> Tensor:
        """`F(r) = integral_low^r f`, elementwise."""
        return (self.components.cdf(_float64(r).unsqueeze(-1)) @ self.weights).clamp(max=1)

    def ppf(self, q: Tensor | float) -> Tensor:
        """The quantile `F^-1(q)`, `0 <= q <= 1`, elementwise. ValueError for other q."""
        q = _check_probability(q)
        return _quantile(self, q, (self.components.anchor @ self.weights).expand(q.shape))

    def partial_moments(self, a: Tensor | float, b: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
        """`integral_a^b r^n f(r) dr` for n = 0, 1, 2, elementwise; a <= b within the support."""
        start, end = (_float64(end).unsqueeze(-1) for end in (a, b))
        mass, first, second = self.components.partial_moments(start, end)
        return mass @ self.weights, first @ self.weights, second @ self.weights

    def quantization_variance(self, levels: Tensor | list[float]) -> Tensor:
        """`Psi(l)` of level sets `[..., num_levels]`; see `TruncatedNormal.quantization_variance`."""
        levels = check_levels(levels, self.low, self.high)
        return self.components.quantization_variance(levels.unsqueeze(-2)) @ self.weights


Distribution = TruncatedNormal | TruncatedNormalMixture


def _check_probability(q: Tensor | float) -> Tensor:
    q = _float64(q)
    if not ((q >= 0) & (q <= 1)).all():
        raise ValueError(f"probabilities must lie in [0, 1], got {q}")
    return q


def _quantile(dist: Distribution, q: Tensor, guess: Tensor) -> Tensor:
    low, high = torch.full_like(q, dist.low), torch.full_like(q, dist.high)
    start = torch.where(torch.isfinite(guess), guess, (low + high) / 2).clamp(dist.low, dist.high)
    root = increasing_root(lambda r: (dist.cdf(r) - q, dist.pdf(r)), start, low, high, PPF_TOLERANCE * q)
    return torch.where(q <= 0, low, torch.where(q >= 1, high, root))
