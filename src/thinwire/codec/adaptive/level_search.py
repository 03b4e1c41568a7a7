"""Search for the level set of least variance under a distribution of normalised coordinates.

A level set is an increasing float64 vector from -1 to 1. Unbiased stochastic rounding to the levels has the expected
squared error `Psi(l)` (`TruncatedNormalMixture.quantization_variance`). A search moves all levels but the outer two.
One tensor holds all starts of a search, one per row. The result depends on the arguments alone, so workers with equal
statistics find equal levels.

Source: Faghri et al., "Adaptive Gradient Quantization for Data-Parallel SGD", arXiv 2010.12460.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...algorithm import require
from .cdf_integral import CdfIntegral, FoldedCdfIntegral
from .distributions import TruncatedNormalMixture
from .level_sets import equidistant, exponential_levels, half, mirror, powers_of
from .roots import increasing_root

Cdf = CdfIntegral | FoldedCdfIntegral

SETTLED = 1e-9  # sweeps end early when no level moves by more
LEVEL_TOLERANCE = 1e-10  # on dPsi/dl, per width of the interval; Psi is off by its square
GRADIENT_RATE = 1.0  # suits Psi, whose second derivatives are close to the mass between neighbouring levels
MULTIPLIER_RATE = 0.7
CLIP = 0.45  # of the nearer gap; at one half, two neighbours could meet
SMALLEST_MULTIPLIER, LARGEST_MULTIPLIER, LONGEST_STEP = 0.01, 0.99, 0.1


class _Search:
    """The variables of a search from given levels, and the derivatives of Psi.

    For symmetric sets the variables are the half `0, l_1, ..., 1`, under the folded distribution. Without a level at
    zero (`mirrored`), the left neighbour of l_1 is -l_1.
    """

    def __init__(self, levels: Tensor, dist: TruncatedNormalMixture, symmetric: bool) -> None:
        require(
            not symmetric or torch.equal(levels, -levels.flip(0)),
            f"expected symmetric levels, got {levels.tolist()}; symmetric=False searches over all sets",
        )
        self.levels, self.dist, self.symmetric = levels, dist, symmetric
        self.zero = bool((levels == 0).any())
        self.mirrored = symmetric and not self.zero
        self.cdf: Cdf = FoldedCdfIntegral(CdfIntegral(dist)) if symmetric else CdfIntegral(dist)

    def variables(self, levels: Tensor) -> Tensor:
        return half(levels) if self.symmetric else levels

    def full(self, variables: Tensor) -> Tensor:
        return mirror(variables[..., 1:], self.zero) if self.symmetric else variables

    def derivative(self, at: int, step: int, x: Tensor, levels: Tensor, H: Tensor) -> tuple[Tensor, Tensor]:
        """dPsi/dl and its slope for levels `at, at + step, ...` moved to x.

        The derivative is `(b-a) F(x) - (H(b)-H(a))` with neighbours a and b. It is zero where F(x) is the mean of F over
        [a, b], which equals the published `F(b) - integral over [a, b] of (r-a)/(b-a) dF`. It increases in x, so its root
        is the optimum.
        """
        left, right, H_left, H_right = (
            t[..., at + shift : t.shape[-1] - 1 + shift : step] for t in (levels, H) for shift in (-1, 1)
        )
        H_x, F_x, f_x = self.cdf(x)
        own = torch.zeros(x.shape[-1], dtype=torch.bool, device="cpu")
        own[:1] = self.mirrored and at == 1  # there may be no interior level at all
        left, H_left = torch.where(own, -x, left), torch.where(own, H_x, H_left)
        return (right - left) * F_x - (H_right - H_left), (right - left) * f_x + 2 * own * F_x

    def sweep(self, levels: Tensor) -> Tensor:
        """Move every interior level to its optimum given its neighbours: first all odd ones, then all even ones."""
        # Odd levels have even neighbours only, so that all of them can move at once.
        for at in (1, 2):
            if levels.shape[-1] > at + 1:
                levels = self._half_sweep(levels, at)
        return levels

    def _half_sweep(self, levels: Tensor, at: int) -> Tensor:
        H, _, _ = self.cdf(levels)
        inside = slice(at, -1, 2)
        low, high = levels[..., at - 1 : -2 : 2], levels[..., at + 1 :: 2]
        tolerance = LEVEL_TOLERANCE * (high - low) + self.cdf.rounding
        moved = levels.clone()
        moved[..., inside] = increasing_root(
            lambda x: self.derivative(at, 2, x, levels, H), levels[..., inside], low, high, tolerance
        )
        return moved

    def shifted_variance(self, levels: Tensor) -> tuple[Tensor, Tensor]:
        """Psi without a constant that depends on the distribution alone, and its gradient for the interior levels."""
        H, _, _ = self.cdf(levels)
        left, H_left = levels[..., :-1].clone(), H[..., :-1].clone()
        if self.mirrored:
            left[..., 0], H_left[..., 0] = -levels[..., 1], H[..., 1]
        areas = (levels[..., 1:] - left) * (H_left + H[..., 1:])
        if self.mirrored:
            areas[..., 0] /= 2  # the folded density counts the interval around zero twice
        return areas.sum(dim=-1), self.derivative(1, 1, levels[..., 1:-1], levels, H)[0]

    def quantiles(self) -> Tensor:
        """Levels at equidistant values of F."""
        steps = equidistant(self.levels.numel())
        fractions = half(steps)[1:-1] if self.symmetric else (steps[1:-1] + 1) / 2
        low, high = torch.full_like(fractions, self.cdf.low), torch.ones_like(fractions)

        def excess(x: Tensor) -> tuple[Tensor, Tensor]:
            _, F, f = self.cdf(x)
            return F - fractions, f

        interior = increasing_root(excess, (low + high) / 2, low, high, fractions * LEVEL_TOLERANCE)
        return self.full(torch.cat([low.new_tensor([self.cdf.low]), interior, low.new_ones(1)]))

    def starts(self) -> Tensor:
        """Rows: the given levels, uniform, exponential, quantiles."""
        num_levels = self.levels.numel()
        base = torch.tensor(0.5, dtype=torch.float64, device="cpu")
        exponential = mirror(powers_of(base, num_levels // 2), bool(num_levels % 2))
        return torch.stack([self.levels, equidistant(num_levels), exponential, self.quantiles()])

    def best(self, candidates: Tensor) -> Tensor:
        """The candidate of least Psi; ties go to the first."""
        return candidates[torch.argmin(self.dist.quantization_variance(candidates))]


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
    variables = search.variables(starts)
    for _ in range(sweeps):
        before, variables = variables, search.sweep(variables)
        if (variables - before).abs().max() <= SETTLED:
            break
    # The starts too, so that the result is never worse than any of them.
    return search.best(torch.cat([search.full(variables), starts]))


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
    return search.best(torch.cat([search.full(variables), starts]))


def _clipped_step(levels: Tensor, step: Tensor) -> Tensor:
    gaps = levels.diff(dim=-1)
    limit = CLIP * torch.minimum(gaps[..., :-1], gaps[..., 1:])
    moved = levels.clone()
    moved[..., 1:-1] -= torch.minimum(torch.maximum(step, -limit), limit)
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
    search, count = _Search(present, dist, True), present.numel() // 2
    starts = torch.tensor([[multiplier], *([i / 10] for i in range(1, 10))], dtype=torch.float64, device="cpu")
    constant = dist.quantization_variance(present) - search.shifted_variance(half(present))[0]
    powers = torch.arange(count - 1, 0, -1, dtype=torch.float64, device="cpu")

    def log_variance(p: Tensor) -> tuple[Tensor, Tensor]:
        positive = powers_of(p.squeeze(-1), count)
        shifted, gradient = search.shifted_variance(torch.cat([torch.zeros_like(p), positive], dim=-1))
        # Also the value to compare, because the logarithm keeps its order. The sum may round below zero.
        variance = (shifted + constant).clamp(min=torch.finfo(torch.float64).tiny)
        slope = (gradient * powers * p ** (powers - 1)).sum(dim=-1)
        return variance, (slope / variance).unsqueeze(-1)

    found = torch.cat([_descend(starts, log_variance, _multiplier_step, MULTIPLIER_RATE), starts])
    candidates = exponential_levels(bits, found.squeeze(-1), zero)
    return found[torch.argmin(dist.quantization_variance(candidates))].item()


def _multiplier_step(p: Tensor, step: Tensor) -> Tensor:
    return (p - step.clamp(-LONGEST_STEP, LONGEST_STEP)).clamp(SMALLEST_MULTIPLIER, LARGEST_MULTIPLIER)


def _descend(
    x: Tensor,
    evaluate: Callable[[Tensor], tuple[Tensor, Tensor]],
    move: Callable[[Tensor, Tensor], Tensor],
    rate: float,
    num_steps: int = 50,
) -> Tensor:
    """Gradient descent of every row of x. A row whose value would not decrease does not move and halves its rate."""
    rates = torch.full_like(x[..., :1], rate)
    value, gradient = evaluate(x)
    for _ in range(num_steps):
        trial = move(x, rates * gradient)
        trial_value, trial_gradient = evaluate(trial)
        falls = (trial_value < value).unsqueeze(-1)
        x, gradient = torch.where(falls, trial, x), torch.where(falls, trial_gradient, gradient)
        value, rates = torch.where(falls.squeeze(-1), trial_value, value), torch.where(falls, rates, rates / 2)
    return x
