"""Robust rules: each held to its equation in plain float64, and to what it must bear."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.calls import Operations

import thinwire as tw
from thinwire.average import Bucketing, CenteredClipping, GeometricMedian, Krum, Median, MedianNorm, Rule, TrimmedMean
from thinwire.average.robust import base
from thinwire.average.robust.base import Messages, dots, gram

NUMELS = [7, 30, 3]
RULES = [
    MedianNorm(),
    CenteredClipping(tau=4.0),
    CenteredClipping(tau=4.0, iterations=1),
    Median(),
    TrimmedMean(faulty=2),
    GeometricMedian(),
    GeometricMedian(iterations=3, nu=5.0),
    Krum(faulty=2),
    Krum(faulty=2, selected=5),
    Krum(faulty=0, selected=3),
]
every_rule = pytest.mark.parametrize("rule", [*RULES, *(Bucketing(rule) for rule in RULES[:4])], ids=repr)


def messages(k=8, seed=0, outliers=0):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(k, sum(NUMELS), generator=generator) + 0.5
    rows[:outliers] *= 1e6
    return Messages(rows, NUMELS, center=torch.randn(sum(NUMELS), generator=generator), seed=seed)


def median_norm(rule, rows, center):
    parts = []
    for segment in rows.split(NUMELS, 1):
        norms = [row.norm() for row in segment]
        bound = sorted(norms)[(len(norms) - 1) // 2]
        parts.append(sum(row * min(1.0, bound / norm) for row, norm in zip(segment, norms, strict=True)) / len(rows))
    return torch.cat(parts)


def centered_clipping(rule, rows, v):
    for _ in range(rule.iterations):
        differences = [row - v for row in rows]
        v = v + sum(d * min(1.0, rule.tau / d.norm()) for d in differences) / len(rows)
    return v


def median(rule, rows, center):
    return rows.quantile(0.5, dim=0)


def trimmed_mean(rule, rows, center):
    columns = [sorted(column.tolist())[rule.faulty : len(rows) - rule.faulty] for column in rows.T]
    return torch.tensor([sum(column) / len(column) for column in columns], dtype=torch.float64)


def geometric_median(rule, rows, center):
    z = torch.zeros_like(rows[0])
    for _ in range(rule.iterations):
        inverse = [1 / max(float((row - z).norm()), rule.nu) for row in rows]
        z = sum(row * factor for row, factor in zip(rows, inverse, strict=True)) / sum(inverse)
    return z


def krum(rule, rows, center):
    def score(i):
        distances = sorted(float((rows[i] - rows[j]).square().sum()) for j in range(len(rows)) if j != i)
        return sum(distances[: len(rows) - rule.faulty - 2])

    best = sorted(range(len(rows)), key=score)[: rule.selected]
    return rows[best].mean(0)


REFERENCES = {
    MedianNorm: median_norm,
    CenteredClipping: centered_clipping,
    Median: median,
    TrimmedMean: trimmed_mean,
    GeometricMedian: geometric_median,
    Krum: krum,
}


@pytest.mark.parametrize("outliers", [0, 2])
@pytest.mark.parametrize("k", [7, 8])
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_a_rule_is_its_equation(rule, k, outliers):
    given = messages(k, seed=k, outliers=outliers)
    expected = REFERENCES[type(rule)](rule, given.rows.double(), given.center.double())
    result = rule.combine(given).result
    assert result.dtype == torch.float32
    size = float(expected.abs().max())  # float32 sums of rows round at the size of the largest of them
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5 * max(1.0, size))


@pytest.mark.parametrize(
    "rule", [CenteredClipping(tau=math.inf), TrimmedMean(faulty=0), GeometricMedian(nu=1e9), Krum(faulty=0, selected=8)]
)
@pytest.mark.parametrize("wrap", [lambda rule: rule, Bucketing], ids=["alone", "in buckets"])
def test_a_rule_that_bounds_nothing_gives_the_mean(rule, wrap):
    given = messages()
    mean = given.rows.double().mean(0)
    torch.testing.assert_close(wrap(rule).combine(given).result.double(), mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_the_order_of_workers_changes_rounding_only(rule):
    given = messages(outliers=2)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    permuted = Messages(given.rows[order], NUMELS, center=given.center)
    torch.testing.assert_close(rule.combine(permuted).result, rule.combine(given).result, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rule", [*RULES[:-1], *(Bucketing(rule) for rule in RULES[:3])], ids=repr)
@pytest.mark.parametrize("huge", [1e6, 1e30])
def test_two_of_eight_cannot_move_the_result_far(rule, huge):
    """Clipping bounds the pull of a wrong worker, all others hardly feel it; the mean would move by a quarter of `huge`."""
    given = messages()
    rows = given.rows.clone()
    rows[3] = huge
    rows[6] = -huge / 2
    moved = rule.combine(Messages(rows, NUMELS, center=given.center, seed=1)).result - given.rows[
        [0, 1, 2, 4, 5, 7]
    ].mean(0)
    assert moved.norm() < 10.0


def test_clipping_reports_what_it_dropped():
    rows = torch.tensor([[3.0, 4.0, 0.0], [0.0, 0.0, 5.0], [30.0, 40.0, 0.0]])
    clipped = MedianNorm().combine(Messages(rows, [3]))
    torch.testing.assert_close(clipped.dropped, torch.tensor([0.0, 0.0, 45.0], dtype=torch.float64))
    clipped = CenteredClipping(tau=10.0, iterations=1).combine(Messages(rows, [3], center=torch.zeros(3)))
    torch.testing.assert_close(clipped.dropped, torch.tensor([0.0, 0.0, 40.0], dtype=torch.float64))
    torch.testing.assert_close(clipped.norms, torch.tensor([5.0, 5.0, 50.0], dtype=torch.float64))


def test_workers_without_a_part_shorten_nobody():
    """Two of four have just joined and send zeros; of two messages nobody can tell which one is too large."""
    rows = torch.tensor([[3.0, 4.0], [0.0, 50.0]])
    joined = torch.zeros(2, 2)
    for given in (rows, torch.cat([rows, joined]), torch.cat([rows, rows[:1], rows[:1], joined, joined])):
        combined = MedianNorm().combine(Messages(given, [2]))
        torch.testing.assert_close(
            combined.dropped,
            torch.zeros(len(given), dtype=torch.float64).index_fill_(
                0, torch.tensor([1] if len(given) > 4 else [], dtype=torch.long), 45.0
            ),
        )


def test_buckets_are_means_of_shuffled_groups():
    given = messages(7, seed=3)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(3))
    means = torch.stack([given.rows[group].double().mean(0) for group in order.split(2)])
    expected = median(None, means, None)
    torch.testing.assert_close(Bucketing(Median()).combine(given).result.double(), expected, rtol=1e-5, atol=1e-6)
    other = Messages(given.rows, NUMELS, seed=4)
    assert not torch.equal(Bucketing(Median()).combine(given).result, Bucketing(Median()).combine(other).result)


def test_workers_that_are_left_out_count_as_faulty():
    rows = torch.tensor([[1.0], [2.0], [3.0], [9.0]])
    assert TrimmedMean(faulty=1).combine(Messages(rows, [1])).result.item() == 2.5
    assert TrimmedMean(faulty=1).combine(Messages(rows[:3], [1], left_out=1)).result.item() == 2.0
    chosen = Krum(faulty=1, selected=4).combine(Messages(rows, [1], left_out=1)).result
    assert chosen.item() == pytest.approx(3.75)


@pytest.mark.parametrize("n", [1, 5, 1000, 40000])
def test_products_are_exact_sums_of_exact_products(n):
    generator = torch.Generator().manual_seed(n)
    rows = torch.randn(3, n, generator=generator) * 10 ** torch.randint(-3, 3, (3, 1), generator=generator)
    expected = [[math.fsum((a.double() * b.double()).tolist()) for b in rows] for a in rows]
    torch.testing.assert_close(gram(rows), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = dots(rows, rows)
        torch.set_num_threads(4)
        assert torch.equal(dots(rows, rows), alone)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("n", [1, base.WIDTH, 70 * base.WIDTH + 5])
def test_on_a_gpu_products_are_the_same_in_few_launches(n, monkeypatch):
    """Only the sums of the trees are added one after the other."""
    rows = torch.randn(3, n, generator=torch.Generator().manual_seed(0))
    expected = dots(rows, rows), dots(rows, rows[1])
    monkeypatch.setattr(base, "in_main_memory", lambda device: False)
    with Operations() as operations:
        found = dots(rows, rows)
    assert torch.equal(found, expected[0]) and torch.equal(dots(rows, rows[1]), expected[1])
    assert operations.number < 60 + n // base.WIDTH


@every_rule
def test_notation(rule):
    averager = tw.Mean(tw.QSGD(bits=4), rule=rule)
    assert tw.parse(repr(averager)) == averager and tw.parse(repr(rule)) == rule


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: CenteredClipping(tau=0), "tau must be above 0, got 0"),
        (lambda: CenteredClipping(iterations=0), "iterations must be an integer, 1 or more, got 0"),
        (lambda: TrimmedMean(faulty=-1), "faulty must be an integer, 0 or more, got -1"),
        (lambda: GeometricMedian(nu=0.0), "nu must be above 0 and finite, got 0.0"),
        (lambda: Krum(selected=0), "selected must be an integer, 1 or more, got 0"),
        (lambda: Bucketing("median"), "rule must be a rule such as TrimmedMean"),
        (lambda: Bucketing(Median(), s=0), "s must be an integer, 1 or more, got 0"),
        (lambda: Median(patience=0), "patience must be an integer, 1 or more, or None, got 0"),
    ],
)
def test_wrong_options_are_refused(make, line):
    with pytest.raises(ValueError, match=line):
        make()


@pytest.mark.parametrize(
    ("rule", "fewest"),
    [
        (Median(), 1),
        (TrimmedMean(faulty=2), 5),
        (Krum(faulty=1), 5),
        (Krum(faulty=1, selected=7), 8),
        (Bucketing(TrimmedMean(faulty=2)), 9),
        (Bucketing(Krum(faulty=1), s=3), 13),
    ],
    ids=repr,
)
def test_the_fewest_workers_of_a_rule(rule: Rule, fewest: int):
    rule.check_size(0, fewest)
    if fewest > 1:
        with pytest.raises(ValueError, match=f"rank 3: .* needs at least {fewest} workers, got {fewest - 1}"):
            rule.check_size(3, fewest - 1)
