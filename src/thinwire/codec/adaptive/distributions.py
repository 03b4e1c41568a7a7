"""Mixtures of truncated normal distributions: the model of normalised gradient coordinates.

All formulas are float64 and in closed form. They use `erf` and `exp`, scaled where the plain ones would cancel (see
`gaussian_integrals`). A standard deviation is at least 1e-12, which is close to a point mass, and at most 1e3, which is close
to a uniform density. Coordinates that are divided by their bucket's norm have means in [-1, 1] and deviations up to 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...algorithm import require
from .gaussian_integrals import SQRT_2PI, spread, tail

POINT_MASS, WIDEST = 1e-12, 1e3


@dataclass(frozen=True, eq=False)
class TruncatedNormalMixture:
    """`f(r) = sum_k weights_k f_k(r)` on [-1, 1], with `f_k(r) = exp(-(r-means_k)^2/(2 stds_k^2)) / Z_k` there.

    Args:
        weights: float64 `[K]`, not negative, not all zero; they are scaled to sum to 1. Components of zero weight are dropped.
        means, stds: float64 `[K]`, before truncation; `stds >= 0`. A mean outside of [-1, 1] counts as the nearer end.

    Raises:
        ValueError: for numbers that are negative where they must not be or not finite, or weights that are all zero.

    Example:
        >>> weights, means, stds = torch.tensor([[3.0, 1.0], [0.0, 0.1], [0.2, 0.05]], dtype=torch.float64)
        >>> mixture = TruncatedNormalMixture(weights, means, stds)
        >>> mixture.weights.tolist()
        [0.75, 0.25]
        >>> round(mixture.quantization_variance(torch.tensor([-1.0, 0.0, 1.0])).item(), 6)
        0.11177
    """

    weights: Tensor
    means: Tensor
    stds: Tensor

    def __post_init__(self) -> None:
        weights, means, stds = self.weights, self.means, self.stds
        finite = all(bool(field.isfinite().all()) for field in (weights, means, stds))
        require(
            finite and bool((weights >= 0).all() and weights.any() and (stds >= 0).all()),
            "a mixture needs finite numbers, stds and weights that are not negative, and weights that are not all zero; got "
            f"weights={weights.tolist()}, means={means.tolist()}, stds={stds.tolist()}",
        )
        kept = weights > 0
        weights = weights[kept] / weights.max()  # first by the largest, so that the sum cannot overflow
        means, stds = means[kept].clamp(-1, 1), stds[kept].clamp(POINT_MASS, WIDEST)
        for name, value in {"weights": weights / weights.sum(), "means": means, "stds": stds}.items():
            object.__setattr__(self, name, value)

    @cached_property
    def mass(self) -> Tensor:
        """The integral of each component over [-1, 1], relative to its value at the mean: all of it less the tails."""
        below, above = (tail((end - self.means).abs() / self.stds) for end in (-1.0, 1.0))
        return self.stds * (SQRT_2PI - below - above)

    def quantization_variance(self, levels: Tensor) -> Tensor:
        r"""Expected squared error of unbiased stochastic rounding to `levels`.

        `Psi(l) = sum_j integral over [l_j, l_{j+1}] of (l_{j+1}-r)(r-l_j) f(r) dr` (Faghri et al., "Adaptive Gradient
        Quantization for Data-Parallel SGD", arXiv 2010.12460).

        Args:
            levels: `[..., num_levels]`, non-decreasing from -1 to 1.

        Returns:
            Psi, of the shape of `levels` without its last axis. Relative error: 1e-10.
        """
        levels = levels.to(torch.float64).unsqueeze(-2)
        means, stds = self.means.unsqueeze(-1), self.stds.unsqueeze(-1)
        spreads = spread(levels[..., :-1], levels[..., 1:], means, stds)
        return (spreads.sum(dim=-1) / self.mass) @ self.weights
