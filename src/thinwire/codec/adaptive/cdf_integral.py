"""The integral of a distribution function: the one function that a search for levels needs.

Let `H(x) = integral_-1^x F`, so that `H' = F` and `H'' = f`. Integration by parts, twice, shows that the variance of a
level set is the error of the trapezoidal rule for 2H on the levels:

    Psi(l) = sum_j (l_{j+1}-l_j) (H(l_j)+H(l_{j+1})) - 2 integral_-1^1 H.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from .distributions import TruncatedNormalMixture
from .gaussian_integrals import LEAST_EXPONENT

Array = NDArray[np.float64]

EPSILON = torch.finfo(torch.float64).eps
SQRT_PI = math.sqrt(math.pi)
CHUNK = 16_000  # numbers: less than 128 kB, whose memory is used again, and which one thread adds up


class CdfIntegral:
    """`x -> (x, H(x), F(x), f(x))` for x in [-1, 1]: one `erf` and one `exp` per point and component.

    With `u = (x - mean) / (sqrt(2) std)` it is the sum over components of

        f ~ exp(-u^2) / sqrt(pi),    F ~ erf(u) - erf(u_low),    H ~ u F + f(u) - f(u_low)

    The absolute error is near 1e-16 for standard deviations up to 2. `rounding` estimates the error of H.

    Args:
        dist: of r.
        folded: whether to take the distribution of the magnitude |r|, with density `f(r) + f(-r)` on [0, 1], which is what
            symmetric level sets need. A component at -mean joins each one, and H and F start at 0.

    Attributes:
        low: the lower end of x; the upper end is 1.

    Example:
        >>> from thinwire.codec.adaptive.statistics import prior
        >>> x, H, F, f = CdfIntegral(prior(4, "l2"))(np.ones(1))
        >>> round(H.item(), 9), round(F.item(), 9), round(f.item(), 6)
        (1.0, 1.0, 0.113129)
        >>> round(CdfIntegral(prior(4, "l2"), folded=True)(np.ones(1))[2].item(), 9)
        1.0
    """

    def __init__(self, dist: TruncatedNormalMixture, folded: bool = False) -> None:
        weights, means, stds = (field.numpy() for field in (dist.weights, dist.means, dist.stds))
        if folded:
            weights, means, stds = np.tile(weights, 2), np.concatenate([means, -means]), np.tile(stds, 2)
        self.low = 0.0 if folded else -1.0
        self.mean, self.scale = means, math.sqrt(0.5) / stds
        _, (below, self.area_low, above), heights = self._parts(np.array([[-1.0], [self.low], [1.0]]))
        self.height_low, self.of_F = heights[1], weights / (above - below)
        self.of_f, self.of_H = 2 * self.of_F * self.scale, self.of_F / self.scale
        self.rounding = (8 if folded else 4) * EPSILON * float(self.of_H.sum()) / SQRT_PI

    def __call__(self, x: Array) -> Array:
        points = np.empty((4, x.size))
        points[0] = x.reshape(-1)
        step = max(1, CHUNK // self.mean.size)
        for start in range(0, x.size, step):
            chunk = points[:, start : start + step]
            u, area, height = self._parts(chunk[0, :, None])
            area -= self.area_low
            chunk[2], chunk[3] = area @ self.of_F, height @ self.of_f
            chunk[1] = (u * area + (height - self.height_low)) @ self.of_H
        return points.reshape(4, *x.shape)

    def _parts(self, x: Array) -> tuple[Array, Array, Array]:
        """`u`, `erf(u)` and `exp(-u^2) / sqrt(pi)`, `[points, components]`, for x `[points, 1]`."""
        u = (x - self.mean) * self.scale
        exponent = np.maximum(-math.log(SQRT_PI) - u * u, LEAST_EXPONENT)
        return u, torch.erf(torch.from_numpy(u)).numpy(), np.exp(exponent)
