"""Level sets and their search.

What is guaranteed, and so tested without exception: a sweep never raises Psi; `alq` and `alq_gd` are no worse than the
given, uniform, exponential (p = 1/2) and quantile levels; `amq` no worse than its given p and 0.1, ..., 0.9; and `alq`
started from the levels of `amq` no worse than those. Without that start, alq <= amq is a finding, not a theorem, for
Psi may have several minima; it is checked on mixtures like those of gradients.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from thinwire.codec.adaptive.cdf_integral import CdfIntegral
from thinwire.codec.adaptive.distributions import TruncatedNormalMixture
from thinwire.codec.adaptive.level_search import _Search, alq, alq_gd, amq
from thinwire.codec.adaptive.level_sets import equidistant, exponential_levels
from thinwire.codec.adaptive.statistics import bucket_statistics, mixture, pooled

ROUNDING = 1e-12  # relative; the closed form of Psi itself is good to about 1e-11 of each term


def truncated_normals(weights, means, stds) -> TruncatedNormalMixture:
    return TruncatedNormalMixture(*(torch.as_tensor(t, dtype=torch.float64) for t in (weights, means, stds)))


def truncated_normal(mean: float, std: float) -> TruncatedNormalMixture:
    return truncated_normals([1.0], [mean], [std])


def uniform_levels(bits: int, zero: bool = False) -> torch.Tensor:
    return equidistant(2**bits - zero)


def gradient_mixture(seed: int, scale: float = 0.2, num_components: int = 100) -> TruncatedNormalMixture:
    rng = np.random.default_rng(seed)
    means, stds = 0.2 * scale * rng.standard_normal(num_components), scale * rng.uniform(0.3, 1.3, num_components)
    return truncated_normals(rng.random(num_components), means, stds)


MIXTURES = {
    "max-norm": gradient_mixture(0),
    "l2-norm": gradient_mixture(1, 0.015),
    "wide": gradient_mixture(2, 2.0),
    "bimodal": truncated_normals([1.0, 2.0], [-0.6, 0.5], [0.05, 0.2]),
    "at the ends": truncated_normals([1.0, 1.0], [-1.0, 1.0], [0.4, 0.5]),
    "almost uniform": truncated_normals([1.0], [0.0], [1e6]),
    "one": truncated_normal(0.05, 0.3),
}


@pytest.fixture(params=MIXTURES)
def dist(request):
    return MIXTURES[request.param]


def in_pairs(names: str, options):
    """Each mixture with two of the options, and each option with two mixtures or more."""
    options, pairs = list(options), []
    for i, name in enumerate(MIXTURES):
        for j in (2 * i, 2 * i + 1):
            pairs.append((name, *options[j % len(options)]))
    return pytest.mark.parametrize(f"dist, {names}", pairs, indirect=["dist"])


def psi(dist, levels) -> float:
    return dist.quantization_variance(levels).item()


def is_level_set(levels, symmetric: bool) -> bool:
    ends = levels[0] == -1 and levels[-1] == 1
    return bool(ends and (levels.diff() > 0).all() and (not symmetric or torch.equal(levels, -levels.flip(0))))


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_fixed_level_sets(bits, zero):
    uniform, exponential = uniform_levels(bits, zero), exponential_levels(bits, 0.7, zero)
    for levels in (uniform, exponential):
        assert levels.numel() == 2**bits - zero
        assert is_level_set(levels, symmetric=True)
        assert bool((levels == 0).any()) == zero
    np.testing.assert_allclose(uniform, np.linspace(-1, 1, 2**bits - zero), atol=1e-15)
    positive = exponential[exponential > 0]
    np.testing.assert_allclose(positive[:-1] / positive[1:], 0.7)


@in_pairs("zero, symmetric", itertools.product([False, True], repeat=2))
def test_variance_never_rises_in_a_sweep(dist, zero, symmetric):
    for levels in (uniform_levels(3, zero), exponential_levels(3, zero=zero), exponential_levels(3, 0.1, zero=zero)):
        # symmetric sets of a skew density are swept under the density of |r|, whose Psi is the same
        variances = [psi(dist, levels)]
        for _ in range(6):
            search = _Search(levels, dist, symmetric)
            points = search.points(search.variables(levels)[None])
            search.sweep(points)
            levels = search.full(points[0, 0])
            variances.append(psi(dist, levels))
            assert is_level_set(levels, symmetric)
        assert all(after <= before * (1 + ROUNDING) for before, after in itertools.pairwise(variances))


@in_pairs("search, symmetric", itertools.product([alq, alq_gd], [False, True]))
def test_no_worse_than_any_start(dist, search, symmetric):
    given = exponential_levels(3, 0.3)
    found = search(given, dist, symmetric=symmetric)
    starts = [given, uniform_levels(3), exponential_levels(3)]
    if not symmetric:
        quantiles = _Search(given, dist, symmetric).quantiles()
        np.testing.assert_allclose(CdfIntegral(dist)(quantiles.numpy())[2], np.linspace(0, 1, 8), atol=1e-8)
        starts.append(quantiles)
    assert is_level_set(found, symmetric)
    assert all(psi(dist, found) <= psi(dist, start) * (1 + ROUNDING) for start in starts)


@in_pairs(
    "bits, zero, symmetric",
    [(2, False, False), (2, True, True), (3, False, True), (3, True, False), (4, False, False), (4, True, True)],
)
def test_result_is_a_local_optimum(dist, bits, zero, symmetric):
    levels = alq(uniform_levels(bits, zero), dist, symmetric=symmetric, sweeps=2000)
    best, middle = psi(dist, levels), levels.numel() // 2
    for j in range(middle if symmetric else 1, levels.numel() - 1):
        gap = min(levels[j] - levels[j - 1], levels[j + 1] - levels[j]).item()
        if symmetric and levels[j] == 0:
            continue
        for shift in (-1e-3 * gap, 1e-3 * gap):
            moved = levels.clone()
            moved[j] += shift
            if symmetric:
                moved[-1 - j] -= shift
            assert psi(dist, moved) >= best * (1 - ROUNDING)


def test_level_is_the_published_optimum(dist):
    """F(l_j) = F(b) - integral over [a, b] of (r-a)/(b-a) dF, whose integral is F(b) - (H(b)-H(a))/(b-a) by parts."""
    levels = alq(uniform_levels(3), dist, symmetric=False, sweeps=2000).numpy()
    _, H, F, _ = CdfIntegral(dist)(levels)
    np.testing.assert_allclose(F[1:-1], (H[2:] - H[:-2]) / (levels[2:] - levels[:-2]), atol=1e-7)


def test_uniform_density_keeps_uniform_levels():
    flat = truncated_normal(0.0, 1e9)
    for zero in (False, True):
        found = alq(exponential_levels(3, zero=zero), flat, sweeps=500)
        np.testing.assert_allclose(found, uniform_levels(3, zero), atol=1e-6)


def test_general_search_is_no_worse_than_the_symmetric_one_from_its_result(dist):
    symmetric = alq(uniform_levels(3), dist)
    assert psi(dist, alq(symmetric, dist, symmetric=False)) <= psi(dist, symmetric) * (1 + ROUNDING)


@pytest.mark.parametrize("zero", [False, True])
def test_amq_no_worse_than_its_starts_and_alq_from_it_no_worse(dist, zero):
    p = amq(0.55, dist, bits=3, zero=zero)
    levels = exponential_levels(3, p, zero)
    fixed = [psi(dist, exponential_levels(3, start, zero)) for start in (0.55, *np.arange(1, 10) / 10)]
    assert psi(dist, levels) <= min(fixed) * (1 + ROUNDING)
    assert psi(dist, alq(levels, dist)) <= psi(dist, levels) * (1 + ROUNDING)


def test_amq_finds_the_best_multiplier(dist):
    p = amq(0.5, dist, bits=3)
    grid = min(psi(dist, exponential_levels(3, q)) for q in np.linspace(0.02, 0.98, 97))
    assert psi(dist, exponential_levels(3, p)) <= grid * (1 + 1e-4)


def test_alq_beats_amq_beats_fixed_levels_on_gradients():
    generator = torch.Generator().manual_seed(0)
    scales = torch.rand(64, 1, generator=generator).exp()
    gradient = torch.randn(64, 256, generator=generator) * scales * torch.rand(64, 256, generator=generator)
    for norm in ("l2", "max"):
        stats = bucket_statistics(gradient, 256, norm)
        for density in (mixture(stats, 50), mixture(stats, 50, "norm2"), pooled(stats)):
            adaptive = psi(density, alq(uniform_levels(3), density))
            multiplier = psi(density, exponential_levels(3, amq(0.5, density, bits=3)))
            fixed = min(psi(density, uniform_levels(3)), psi(density, exponential_levels(3)))
            assert adaptive <= multiplier <= psi(density, exponential_levels(3))
            assert adaptive <= fixed


def test_gradient_descent_comes_near_coordinate_descent():
    density = MIXTURES["max-norm"]
    found = psi(density, alq_gd(uniform_levels(3), density, num_steps=300))
    assert found <= 1.001 * psi(density, alq(uniform_levels(3), density))


@pytest.mark.parametrize(
    "density",
    [
        truncated_normal(0.3, 0.0),
        truncated_normal(0.0, 1e-12),
        truncated_normals([1, 1, 0], [0.2, -0.7, 0], [1e-12, 1e-12, 1]),
        truncated_normal(-1.0, 1e-12),
    ],
)
def test_point_masses_give_finite_levels(density):
    for symmetric in (False, True):
        for search in (alq, alq_gd):
            levels = search(uniform_levels(3), density, symmetric=symmetric)
            assert torch.isfinite(levels).all()
            assert (levels.diff() >= 0).all()
    assert 0 < amq(0.5, density, bits=3) < 1


def test_same_inputs_same_bits():
    first, second = (alq(uniform_levels(3), gradient_mixture(4)) for _ in range(2))
    assert torch.equal(first, second)


def test_one_bit_has_nothing_to_adapt():
    density = truncated_normal(0.0, 0.3)
    for search in (alq, alq_gd):
        assert search(uniform_levels(1), density).tolist() == [-1, 1]
        assert search(uniform_levels(2, zero=True), density).tolist() == [-1, 0, 1]


def test_levels_that_are_not_symmetric_need_the_general_search():
    """A saved state may hold levels of `symmetric=False`."""
    levels = torch.tensor([-1.0, 0.2, 1.0], dtype=torch.float64)
    assert is_level_set(alq(levels, truncated_normal(0.0, 1.0), symmetric=False), symmetric=False)
    with pytest.raises(ValueError, match="expected symmetric levels, .* symmetric=False searches over all sets"):
        alq(levels, truncated_normal(0.0, 1.0))
