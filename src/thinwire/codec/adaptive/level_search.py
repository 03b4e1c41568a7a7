"""Search for the level set of least variance under a distribution of normalised coordinates.

A level set is an increasing float64 vector from -1 to 1. Unbiased stochastic rounding to the levels has the expected
squared error `Psi(l)` (`TruncatedNormalMixture.quantization_variance`). A search moves all levels but the outer two.
One array holds all starts of a search, one per row; it is NumPy's, whose calls cost less than PyTorch's on few numbers.
The result depends on the arguments alone, so workers with equal statistics find equal levels.

Source: Faghri et al., "Adaptive Gradient Quantization for Data-Parallel SGD", arXiv 2010.12460.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ...algorithm import require
from .cdf_integral import Array, CdfIntegral
from .distributions import TruncatedNormalMixture
from .level_sets import equidistant, exponential_levels, half, mirror, powers_of
from .roots import increasing_root

SETTLED = 1e-9  # sweeps end early when no level moves by more
LEVEL_TOLERANCE = 1e-10  # on dPsi/dl, per width of the interval; Psi is off by its square
GRADIENT_RATE = 1.0  # suits Psi, whose second derivatives are close to the mass between neighbouring levels
MULTIPLIER_RATE = 0.7
CLIP = 0.45  # of the nearer gap; at one half, two neighbours could meet
MARGIN = 1e-13  # of sums of H, far above their rounding
SMALLEST_MULTIPLIER, LARGEST_MULTIPLIER, LONGEST_STEP = 0.01, 0.99, 0.1


class _Search:
    """The variables of a search from given levels, and the derivatives of Psi.

    For symmetric sets the variables are the half `0, l_1, ..., 1`, under the folded distribution. Without a level at
    zero (`mirrored`), the left neighbour of l_1 is -l_1. `points` are the variables and H, F and f there, `[4, starts,
    variables]`.
    """

    def __init__(self, levels: Tensor, dist: TruncatedNormalMixture, symmetric: bool) -> None:
        require(
            not symmetric or torch.equal(levels, -levels.flip(0)),
            f"expected symmetric levels, got {levels.tolist()}; symmetric=False searches over all sets",
        )
        self.levels, self.dist, self.symmetric = levels, dist, symmetric
        self.zero = bool((levels == 0).any())
        self.mirrored = symmetric and not self.zero
        self.cdf = CdfIntegral(dist, folded=symmetric)
        self.ends = self.cdf(np.array([self.cdf.low, 1.0]))

    def variables(self, levels: Tensor) -> Array:
        return (half(levels) if self.symmetric else levels).numpy()

    def full(self, variables: Array) -> Tensor:
        found = torch.from_numpy(variables)
        return mirror(found[..., 1:], self.zero) if self.symmetric else found

    def points(self, variables: Array) -> Array:
        points = np.empty((4, *variables.shape))
        points[..., 1:-1] = self.cdf(variables[..., 1:-1])
        points[..., 0], points[..., -1] = self.ends[:, :1], self.ends[:, 1:]
        return points

    def derivative(self, points: Array, at: int, step: int) -> Callable[[Array], tuple[Array, Array]]:
        """Gives dPsi/dl and its slope for levels `at, at + step, ...` that move to other points.

        The derivative is `(b-a) F(x) - (H(b)-H(a))` with neighbours a and b. It is zero where F(x) is the mean of F over
        [a, b], which equals the published `F(b) - integral over [a, b] of (r-a)/(b-a) dF`. It increases in x, so its root
        is the optimum.
        """
        width, rise = points[:2, :, at + 1 :: step] - points[:2, :, at - 1 : -2 : step]
        if not (self.mirrored and at == 1):
            return lambda inside: (width * inside[2] - rise, width * inside[3])
        own = np.arange(width.shape[-1]) == 0  # where a = -x and H(a) = H(x), in place of 0

        def derivative(inside: Array) -> tuple[Array, Array]:
            x, H, F, f = inside
            between = width + own * x
            return between * F - rise + own * H, between * f + 2 * own * F

        return derivative

    def sweep(self, points: Array) -> None:
        """Move every interior level to its optimum given its neighbours: first all odd ones, then all even ones."""
        # Odd levels have even neighbours only, so that all of them can move at once.
        for at in (1, 2):
            inside, low, high = points[..., at:-1:2], points[0, :, at - 1 : -2 : 2], points[0, :, at + 1 :: 2]
            tolerance = LEVEL_TOLERANCE * (high - low) + self.cdf.rounding
            increasing_root(self.cdf, self.derivative(points, at, 2), inside, low, high, tolerance)

    def shifted_variance(self, variables: Array) -> tuple[Array, Array]:
        """Psi without a constant that depends on the distribution alone, and its gradient for the interior levels."""
        points = self.points(variables)
        levels, H, _, _ = points
        areas = np.diff(levels) * (H[..., :-1] + H[..., 1:])
        if self.mirrored:
            areas[..., 0] *= 2  # from -l_1 to l_1; the folded density counts this interval twice
        return areas.sum(-1), self.derivative(points, 1, 1)(points[..., 1:-1])[0]

    def quantiles(self) -> Tensor:
        """Levels at equidistant values of F."""
        steps = equidistant(self.levels.numel())
        fractions = (half(steps)[1:-1] if self.symmetric else (steps[1:-1] + 1) / 2).numpy()
        low, high = np.full_like(fractions, self.cdf.low), np.ones_like(fractions)
        start, tolerance = self.cdf((low + high) / 2), fractions * LEVEL_TOLERANCE
        interior = increasing_root(self.cdf, lambda at: (at[2] - fractions, at[3]), start, low, high, tolerance)[0]
        return self.full(np.concatenate([[self.cdf.low], interior, [1.0]]))

    def starts(self) -> Tensor:
        """Rows: the given levels, uniform, exponential, quantiles."""
        num_levels = self.levels.numel()
        base = torch.tensor(0.5, dtype=torch.float64, device="cpu")
        exponential = mirror(powers_of(base, num_levels // 2), bool(num_levels % 2))
        return torch.stack([self.levels, equidistant(num_levels), exponential, self.quantiles()])

    def best(self, candidates: Tensor) -> int:
        """The position of the candidate of least Psi; ties go to the first."""
        shifted = self.shifted_variance(self.variables(candidates))[0]
        # Psi itself, which takes far longer, decides between those that rounding could confuse.
        near = torch.from_numpy(np.flatnonzero(shifted <= shifted.min() + MARGIN + 100 * self.cdf.rounding))
        return int(near[self.dist.quantization_variance(candidates[near]).argmin()])


def alq(levels: Tensor, dist: TruncatedNormalMixture, symmetric: bool = True, sweeps: int = 30) -> Tensor:
    r"""Adaptive level quantization: the levels of least variance found by coordinate descent on every level.

    There are four starts: the given levels, uniform, exponential with p = 1/2, and quantiles of F. From each, sweeps
    repeat `l_j <- F^-1( F(l_{j+1}) - integral over [l_{j-1}, l_{j+1}] of (r-l_{j-1})/(l_{j+1}-l_{j-1}) dF(r) )`.
    The set of least Psi is the result. Psi is not convex: the result is a stationary point, never worse than any start.
    Pass the levels of `amq` to get a result that is never worse than those.

    Args:
        levels: the present set `[num_levels]`, strictly increasing from -1 to 1. It determines the number of levels and,
            with `symmetric`, whether zero is one of them.
        dist: the distribution of the normalised coordinates; a mixture for ALQ, one pooled normal for ALQ-N.
        symmetric: whether to search only sets that contain `-l` for every `l`, by the density of |r|.
        sweeps: largest number of sweeps; the search ends early once no level moves by more than 1e-9. Higher => closer to
            the stationary point.

    Returns:
        float64 `[num_levels]`.

    Raises:
        ValueError: for levels that are not symmetric although `symmetric` is set.

    Example:
        >>> from thinwire.codec.adaptive.statistics import prior
        >>> dist, uniform = prior(25, "l2"), equidistant(8)
        >>> bool(dist.quantization_variance(alq(uniform, dist)) < 0.5 * dist.quantization_variance(uniform))
        True

    Source: arXiv 2010.12460.
    """
    search = _Search(levels, dist, symmetric)
    starts = search.starts()
    points = search.points(search.variables(starts))
    for _ in range(sweeps):
        before = points[0].copy()
        search.sweep(points)
        if np.abs(points[0] - before).max() <= SETTLED:
            break
    # The starts too, so that the result is never worse than any of them.
    candidates = torch.cat([search.full(points[0]), starts])
    return candidates[search.best(candidates)]


def alq_gd(levels: Tensor, dist: TruncatedNormalMixture, symmetric: bool = True, num_steps: int = 50) -> Tensor:
    r"""`alq` by gradient descent on all levels at once (ALQ-GD), from the same starts.

    `l_j <- l_j - sign(g_j) min(rate |g_j|, 0.45 d_j)` with `g_j = dPsi/dl_j` and `d_j` the smaller gap next to l_j. This
    limit keeps the order of the levels. The rate is 1 at first. A step that would increase Psi is not taken; the rate is
    halved instead.

    Args:
        levels, dist, symmetric: as for `alq`; the result and the errors are the same too.
        num_steps: steps from each start.

    Example:
        >>> from thinwire.codec.adaptive.statistics import prior
        >>> dist = prior(25, "l2")
        >>> bool(dist.quantization_variance(alq_gd(equidistant(8), dist)) < 0.01)
        True

    Source: arXiv 2010.12460.
    """
    search = _Search(levels, dist, symmetric)
    starts = search.starts()
    variables = _descend(search.variables(starts), search.shifted_variance, _clipped_step, GRADIENT_RATE, num_steps)
    candidates = torch.cat([search.full(variables), starts])
    return candidates[search.best(candidates)]


def _clipped_step(levels: Array, step: Array) -> Array:
    gaps = np.diff(levels)
    limit = CLIP * np.minimum(gaps[..., :-1], gaps[..., 1:])
    moved = levels.copy()
    moved[..., 1:-1] -= np.minimum(np.maximum(step, -limit), limit)
    return moved


def amq(multiplier: float, dist: TruncatedNormalMixture, bits: int, zero: bool = False) -> float:
    r"""Adaptive multiplier quantization: the p of least variance for levels `+-p^j`, by gradient descent.

    `p <- p - rate d log Psi/dp`, from p = 0.1, 0.2, ..., 0.9 and the given p; the p of least Psi is the result. The
    logarithm makes the rate, 0.7 at first, independent of the scale of the coordinates: Psi itself shrinks with the bucket
    size, so descent on Psi with a fixed rate would hardly move. A step is at most 0.1. A step that would increase Psi is
    not taken; the rate is halved instead.

    Args:
        multiplier: the present p, in (0, 1). The result is never worse than it, nor than 0.1, ..., 0.9.
        dist: of the normalised coordinates; a mixture for AMQ, one pooled normal for AMQ-N.
        bits, zero: as in `exponential_levels`.

    Returns:
        p; the levels are `exponential_levels(bits, p, zero)`.

    Example:
        >>> from thinwire.codec.adaptive.statistics import prior
        >>> round(amq(0.5, prior(25, "l2"), bits=3), 3)
        0.43

    Source: arXiv 2010.12460.
    """
    present = exponential_levels(bits, multiplier, zero)
    search, powers = _Search(present, dist, True), np.arange(present.numel() // 2 - 1.0, 0, -1)
    starts = np.array([[multiplier], *([i / 10] for i in range(1, 10))])
    constant = dist.quantization_variance(present).item() - search.shifted_variance(half(present[None]).numpy())[0]

    def log_variance(p: Array) -> tuple[Array, Array]:
        shifted, gradient = search.shifted_variance(np.concatenate([0 * p, p**powers, p**0], axis=-1))
        # Also the value to compare, because the logarithm keeps its order. The sum may round below zero.
        variance = np.maximum(shifted + constant, np.finfo(np.float64).tiny)
        slope = (gradient * powers * p ** (powers - 1)).sum(-1)
        return variance, (slope / variance)[:, None]

    found = np.concatenate([_descend(starts, log_variance, _multiplier_step, MULTIPLIER_RATE), starts])[:, 0]
    return float(found[search.best(exponential_levels(bits, torch.from_numpy(found), zero))])


def _multiplier_step(p: Array, step: Array) -> Array:
    return np.clip(p - np.clip(step, -LONGEST_STEP, LONGEST_STEP), SMALLEST_MULTIPLIER, LARGEST_MULTIPLIER)


def _descend(
    x: Array,
    evaluate: Callable[[Array], tuple[Array, Array]],
    move: Callable[[Array, Array], Array],
    rate: float,
    num_steps: int = 50,
) -> Array:
    """Gradient descent of every row of x. A row whose value would not decrease does not move and halves its rate."""
    rates = np.full_like(x[:, :1], rate)
    value, gradient = evaluate(x)
    for _ in range(num_steps):
        trial = move(x, rates * gradient)
        trial_value, trial_gradient = evaluate(trial)
        falls = trial_value < value
        x, gradient = np.where(falls[:, None], trial, x), np.where(falls[:, None], trial_gradient, gradient)
        value, rates = np.where(falls, trial_value, value), np.where(falls[:, None], rates, rates / 2)
    return x
