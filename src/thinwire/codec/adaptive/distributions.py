"""Mixtures of truncated normal distributions: the model of normalised gradient coordinates.

All formulas are float64 and in closed form. They use `erf` and `exp`, scaled where the plain ones would cancel (see
`gaussian_integrals`). A standard deviation is at least 1e-12, which is close to a point mass.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...algorithm import require
from .gaussian_integrals import interval_integrals

POINT_MASS = 1e-12


@dataclass(frozen=True, eq=False)
class TruncatedNormalMixture:
    """`f(r) = sum_k weights_k f_k(r)` on [-1, 1], with `f_k(r) = exp(-(r-means_k)^2/(2 stds_k^2)) / Z_k` there.

    Args:
        weights: float64 `[K]`, not negative, not all zero; they are scaled to sum to 1. Components of zero weight are dropped.
        means, stds: float64 `[K]`, before truncation; `stds >= 0`, and a mean may lie outside [-1, 1].

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
        scaled = {"weights": weights / weights.sum(), "means": means[kept], "stds": stds[kept].clamp(min=POINT_MASS)}
        for name, value in scaled.items():
            object.__setattr__(self, name, value)

    @cached_property
    def anchor(self) -> Tensor:
        """The mode of each component: the point of [-1, 1] nearest to its mean."""
        return self.means.clamp(-1, 1)

    @cached_property
    def mass(self) -> Tensor:
        """The integral of each component over [-1, 1], relative to its value at the mode."""
        one = torch.ones((), dtype=torch.float64, device="cpu")
        return interval_integrals(-one, one, self.means, self.stds, self.anchor).mass

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
        of_components = (t.unsqueeze(-1) for t in (self.means, self.stds, self.anchor))
        spread = interval_integrals(levels[..., :-1], levels[..., 1:], *of_components).spread
        return (spread.sum(dim=-1) / self.mass) @ self.weights
