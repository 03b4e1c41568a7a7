"""Ring, shares and sites against brute force, a linear program and SciPy's own single linkage."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from thinwire.topology.measured import EXACT, bottleneck_ring, shares, sites, slowest_link


def random_rates(size, seed):
    return np.random.default_rng(seed).lognormal(0, 1, (size, size)).tolist()


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7])
def test_the_slowest_link_of_a_ring_is_the_best_of_all_rings(size):
    for seed in range(12):
        rates = random_rates(size, seed)
        ring = bottleneck_ring(rates)
        assert sorted(ring) == list(range(size)) and ring[0] == 0
        best = max(slowest_link(rates, (0, *rest)) for rest in permutations(range(1, size)))
        assert slowest_link(rates, ring) == best


def test_a_hidden_ring_is_found_among_sixteen_and_a_given_one_stays():
    order = [0, *np.random.default_rng(0).permutation(range(1, EXACT)).tolist()]
    rates = np.ones((EXACT, EXACT))
    rates[order, np.roll(order, -1)] = 2.0
    assert list(bottleneck_ring(rates.tolist())) == order
    assert bottleneck_ring(np.ones((9, 9)).tolist()) == tuple(range(9))


def test_more_workers_than_are_solved_exactly_get_a_ring_that_is_no_worse():
    for seed in range(3):
        rates = random_rates(24, seed)
        ring = bottleneck_ring(rates)
        assert sorted(ring) == list(range(24))
        assert slowest_link(rates, ring) > 3 * slowest_link(rates, range(24))


def program(rates):
    """min t with 1 + (W-2) f_i <= t b_i and sum f = 1; the variables are f and t."""
    from scipy.optimize import linprog  # takes a second

    size = len(rates)
    bounds_of_time = np.hstack([(size - 2) * np.eye(size), -np.array(rates)[:, None]])
    found = linprog(
        [*[0] * size, 1], A_ub=bounds_of_time, b_ub=-np.ones(size), A_eq=[[*[1] * size, 0]], b_eq=[1], bounds=(0, None)
    )
    return found.fun


@pytest.mark.parametrize("size", [3, 4, 7, 16])
def test_shares_take_as_long_as_the_best_of_a_linear_program(size):
    for seed in range(10):
        rates = np.random.default_rng(seed).lognormal(0, 1.2, size).tolist()
        parts = shares(rates)
        assert sum(parts) == pytest.approx(1) and min(parts) >= 0
        time = max((1 + (size - 2) * f) / b for f, b in zip(parts, rates, strict=True))
        assert time == pytest.approx(program(rates), rel=1e-6)


def test_shares_by_hand():
    assert shares([1, 1, 1, 0.25]) == pytest.approx((1 / 3, 1 / 3, 1 / 3, 0))
    assert shares([3, 3, 3]) == pytest.approx((1 / 3,) * 3)
    assert shares([1, 1, 0]) == pytest.approx((0.5, 0.5, 0))  # one that only dials out owns nothing
    assert shares([1, 5]) == (0.5, 0.5)  # two workers swap what they have


def test_sites_are_those_of_single_linkage_cut_at_the_widest_gap():
    from scipy.cluster.hierarchy import fcluster, linkage  # takes a second
    from scipy.spatial.distance import squareform

    random = np.random.default_rng(0)
    for groups in ((0, 0, 1, 1, 2, 2), (0, 1, 0, 1, 1, 0, 2), (0, 0, 0, 1)):
        at = np.array(groups)
        trips = np.where(at[:, None] == at[None, :], 0.0005, 0.06) * random.uniform(0.8, 1.25, (len(at), len(at)))
        trips = np.triu(trips, 1) + np.triu(trips, 1).T
        labels = fcluster(
            linkage(squareform(np.log(trips + np.eye(len(at))) + 20 - 20 * np.eye(len(at)), checks=False)),
            16,
            "distance",
        )
        found = sites(trips.tolist())
        assert {frozenset(site) for site in found} == {frozenset(np.flatnonzero(at == g).tolist()) for g in set(groups)}
        assert {frozenset(site) for site in found} == {
            frozenset(np.flatnonzero(labels == g).tolist()) for g in set(labels.tolist())
        }


def test_without_a_gap_all_stand_in_one_site():
    trips = np.random.default_rng(1).uniform(0.001, 0.002, (6, 6))
    trips = trips + trips.T
    assert sites(trips.tolist()) == (tuple(range(6)),)
    assert sites([[0, 1], [1, 0]]) == ((0, 1),) and sites([[0]]) == ((0,),)
