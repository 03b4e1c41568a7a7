"""Distributions and gradient statistics against scipy, quadrature, and closed forms of the limits."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from thinwire.codec.adaptive.cdf_integral import CdfIntegral
from thinwire.codec.adaptive.distributions import TruncatedNormalMixture
from thinwire.codec.adaptive.statistics import BucketStatistics, bucket_statistics, mixture, pooled

# mean and std on [-1, 1]: ordinary, near the edge, narrow, wide
PARAMETERS = [
    (0.0, 0.5),
    (0.2, 0.1),
    (-0.95, 0.3),
    (0.01, 0.011),
    (0.3, 5.0),
    (0.0, 1000.0),
    (1.0, 0.4),
    (-1.0, 0.02),
]


def truncated_normal(mean: float, std: float) -> TruncatedNormalMixture:
    return TruncatedNormalMixture(*torch.tensor([[1.0], [mean], [std]], dtype=torch.float64))


def float64(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def scipy_truncnorm(mean: float, std: float):
    from scipy import stats

    return stats.truncnorm((-1 - mean) / std, (1 - mean) / std, loc=mean, scale=std)


SPLITS = (-700, -150, -38, -9, -3, 0, 3, 9, 38, 150, 700)  # where quadrature is cut, in scales of the kernel


def kernel_quad(function, a: float, b: float, mean: float, std: float) -> float:
    """integral of function(r) exp(-((r-mean)^2 - (mode-mean)^2)/(2 std^2)), split where the kernel is concentrated."""
    mode = min(max(mean, -1.0), 1.0)

    def integrand(r: float) -> float:
        return function(r) * math.exp(-0.5 * ((r - mode) / std) * ((r + mode - 2 * mean) / std))

    scale = std if mode == mean else min(std, std * std / abs(mode - mean))
    points = sorted({a, b, *(p for p in (mode + scale * k for k in SPLITS) if a < p < b)})
    from scipy.integrate import quad

    pieces = [quad(integrand, p, q, epsabs=0, epsrel=1e-12, limit=200)[0] for p, q in itertools.pairwise(points)]
    return math.fsum(pieces)


def psi_by_quadrature(levels: list[float], mean: float, std: float) -> float:
    total = kernel_quad(lambda r: 1.0, -1.0, 1.0, mean, std)
    intervals = itertools.pairwise(levels)
    return math.fsum(kernel_quad(lambda r, a=a, b=b: (b - r) * (r - a), a, b, mean, std) for a, b in intervals) / total


LEVEL_SETS = {
    "uniform-3bit": np.linspace(-1, 1, 8).tolist(),
    "uniform-8bit": np.linspace(-1, 1, 256).tolist(),
    "exponential": [-1, -0.5, -0.25, -0.125, 0.125, 0.25, 0.5, 1],
    "uneven": [-1, -0.9, 0.0, 1e-3, 0.2, 0.99, 1],
}


@pytest.mark.parametrize("name", LEVEL_SETS)
@pytest.mark.parametrize(("mean", "std"), [*PARAMETERS, (-1.0, 1e-4)])
def test_quantization_variance_matches_quadrature(mean, std, name):
    levels = LEVEL_SETS[name]
    psi = truncated_normal(mean, std).quantization_variance(float64(levels)).item()
    assert psi == pytest.approx(psi_by_quadrature(levels, mean, std), rel=1e-10, abs=0)


def test_uniform_limit_of_a_huge_deviation():
    """A uniform density on [-1, 1] has Psi = sum gap^3 / 12."""
    levels = torch.tensor(LEVEL_SETS["uneven"], dtype=torch.float64)
    psi = truncated_normal(0.0, 1e12).quantization_variance(levels)
    torch.testing.assert_close(psi, (levels.diff() ** 3).sum() / 12, rtol=1e-6, atol=0)


@pytest.mark.parametrize("std", [0.0, 1e-12, 1e-9])
@pytest.mark.parametrize("mean", [0.3, -1.0, 1.0, 2.5, 0.0])
def test_point_mass_limit(mean, std):
    """All mass at the point c nearest to the mean: Psi = (b-c)(c-a), F a step, no NaN."""
    dist, c, levels = truncated_normal(mean, std), min(max(mean, -1), 1), [-1.0, -0.5, 0.1, 0.4, 1.0]
    a, b = max(level for level in levels[:-1] if level <= c), min(level for level in levels[1:] if level >= c)
    psi = dist.quantization_variance(float64(levels)).item()
    assert psi == pytest.approx((b - c) * (c - a), rel=1e-7, abs=1e-8)
    _, H, F, f = CdfIntegral(dist)(np.array([max(c - 1e-3, -1), min(c + 1e-3, 1)]))
    assert F[0].item() == pytest.approx(0, abs=1e-12)
    assert F[1].item() == pytest.approx(1)
    assert np.isfinite(H).all() and np.isfinite(f).all()


def test_what_no_statistics_can_be_is_bounded():
    """Means of coordinates that are divided by their norm lie in [-1, 1], but for rounding."""
    beyond, at = truncated_normal(1.0 + 1e-15, 2e3), truncated_normal(1.0, 1e3)
    assert torch.equal(beyond.means, at.means) and torch.equal(beyond.stds, at.stds)


def random_mixture(num_components: int = 350, seed: int = 0) -> TruncatedNormalMixture:
    rng = np.random.default_rng(seed)
    weights, means = rng.random(num_components), 0.3 * rng.standard_normal(num_components)
    stds = 10 ** rng.uniform(-2.5, 0.5, num_components)
    weights[::7] = 0
    return TruncatedNormalMixture(*map(torch.tensor, (weights, means, stds)))


def test_mixture_is_the_weighted_sum_of_its_components():
    dist = random_mixture()
    truths = [scipy_truncnorm(m, s) for m, s in zip(dist.means.tolist(), dist.stds.tolist(), strict=True)]
    r = np.linspace(-1, 1, 41)
    w = dist.weights.numpy()
    _, _, F, f = CdfIntegral(dist)(r)
    np.testing.assert_allclose(f, w @ np.array([t.pdf(r) for t in truths]), rtol=1e-10)
    np.testing.assert_allclose(F, w @ np.array([t.cdf(r) for t in truths]), rtol=1e-10, atol=1e-14)


def test_mixture_variance_matches_quadrature():
    dist = random_mixture(30)
    for levels in LEVEL_SETS.values():
        parts = [psi_by_quadrature(levels, m, s) for m, s in zip(dist.means.tolist(), dist.stds.tolist(), strict=True)]
        expected = math.fsum(w * p for w, p in zip(dist.weights.tolist(), parts, strict=True))
        assert dist.quantization_variance(float64(levels)).item() == pytest.approx(expected, rel=1e-10)


def test_variance_agrees_with_measured_error():
    """Stochastic rounding of 400,000 samples, drawn without this distribution's code; six standard errors."""
    dist = truncated_normal(0.05, 0.2)
    levels = torch.tensor(LEVEL_SETS["exponential"], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    r = 0.05 + 0.2 * torch.randn(400_000, generator=generator, dtype=torch.float64)
    r = r[r.abs() <= 1]
    upper = torch.searchsorted(levels, r).clamp(1, levels.numel() - 1)
    a, b = levels[upper - 1], levels[upper]
    up = torch.rand(r.numel(), generator=generator, dtype=torch.float64) < (r - a) / (b - a)
    errors = (torch.where(up, b, a) - r) ** 2
    standard_error = errors.std() / math.sqrt(r.numel())
    assert (errors.mean() - dist.quantization_variance(levels)).abs() < 6 * standard_error


@pytest.mark.parametrize(("mean", "std"), PARAMETERS)
def test_cdf_integral_matches_scipy_and_quadrature(mean, std):
    r = np.linspace(-1, 1, 17)
    _, H, F, f = CdfIntegral(truncated_normal(mean, std))(r)
    truth, total = scipy_truncnorm(mean, std), kernel_quad(lambda s: 1.0, -1, 1, mean, std)
    areas = [kernel_quad(lambda s, end=end: end - s, -1, end, mean, std) / total for end in r.tolist()]
    atol = 1e-13 * max(1, std, abs(mean)) ** 2
    np.testing.assert_allclose(F, truth.cdf(r), atol=atol, rtol=0)
    np.testing.assert_allclose(H, areas, atol=atol, rtol=0)  # the integral of F, by parts
    np.testing.assert_allclose(f, truth.pdf(r), rtol=1e-8, atol=1e-300)


def test_folding():
    dist, r = random_mixture(10), np.linspace(0, 1, 9)
    _, H, F, f = CdfIntegral(dist, folded=True)(r)
    (_, H_right, F_right, f_right), (_, H_left, F_left, f_left) = (CdfIntegral(dist)(x) for x in (r, -r))
    np.testing.assert_allclose(H, H_right + H_left - 2 * H_right[0], atol=1e-12, rtol=0)
    np.testing.assert_allclose(F, F_right - F_left, atol=1e-12, rtol=0)
    np.testing.assert_allclose(f, f_right + f_left, atol=1e-9, rtol=0)
    assert H[0] == 0
    assert F[-1].item() == pytest.approx(1)


@pytest.mark.parametrize(
    "weights, mean, std", [([1.0], 0.0, -1.0), ([1.0], math.nan, 1.0), ([0.0], 0.0, 1.0), ([-1.0], 0.0, 1.0)]
)
def test_a_mixture_of_wrong_numbers_is_refused(weights, mean, std):
    """Statistics come from other workers, so that they are checked."""
    with pytest.raises(ValueError, match="a mixture needs finite numbers"):
        TruncatedNormalMixture(float64(weights), float64([mean]), float64([std]))


@pytest.mark.parametrize("norm", ["l2", "max"])
def test_bucket_statistics_match_numpy(norm):
    x = np.random.default_rng(0).standard_normal(1000) * 3 + 1
    found = bucket_statistics(torch.tensor(x), 96, norm)
    for k, bucket in enumerate(np.split(x, range(96, 1000, 96))):
        scale = np.linalg.norm(bucket) if norm == "l2" else np.abs(bucket).max()
        expected = (scale, (bucket / scale).mean(), (bucket / scale).std(), bucket.size)
        actual = [field[k].item() for field in (found.norms, found.means, found.stds, found.counts)]
        assert actual == pytest.approx(expected, rel=1e-12)


def test_empty_and_spoilt_buckets_say_nothing():
    x = torch.tensor([1.0, math.inf, 0.0, 0.0, math.nan, 1.0, 3.0, 4.0])
    found = bucket_statistics(x, 2)
    assert found.norms.tolist() == [0, 0, 0, 5]
    assert all(torch.isfinite(field).all() for field in (found.means, found.stds))
    assert mixture(found, 10).means.tolist() == [found.means[3].item()]
    assert not bucket_statistics(torch.zeros(0), 4).informative


def test_pooled_has_the_moments_of_all_coordinates():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    dist = pooled(bucket_statistics(x, 64, "max"))
    scaled = torch.cat([bucket / bucket.abs().max() for bucket in x.split(64)])
    assert dist.means.item() == pytest.approx(scaled.mean().item(), abs=1e-14)
    assert dist.stds.item() == pytest.approx(scaled.std(correction=0).item(), rel=1e-12)


def test_largest_buckets_by_norm_and_its_square():
    found = BucketStatistics(
        *(torch.tensor(t, dtype=torch.float64) for t in ([1, 4, 2, 4], [0, 0.1, 0.2, 0.3])),
        *[torch.full((4,), value, dtype=torch.float64) for value in (0.5, 8.0)],
    )
    largest = mixture(found, 3)
    assert largest.means.tolist() == [0.1, 0.3, 0.2]  # ties by the lowest index
    assert largest.weights.tolist() == pytest.approx([0.4, 0.4, 0.2])
    assert mixture(found, 3, "norm2").weights.tolist() == pytest.approx([16 / 36, 16 / 36, 4 / 36])


def test_statistics_travel_and_pool():
    x = torch.randn(300)
    whole = bucket_statistics(x, 50)
    parts = [BucketStatistics.from_tensor(bucket_statistics(part, 50).to_tensor()) for part in (x[:150], x[150:])]
    assert torch.equal(BucketStatistics.concatenate(parts).to_tensor(), whole.to_tensor())
