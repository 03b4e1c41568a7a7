"""The choice of a candidate for each layer: exact on small problems, and never worse than one candidate for all."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.codec.adaptive.allocation import allocate


def total(matrix, choice):
    return float(matrix[np.arange(len(choice)), list(choice)].sum())


@st.composite
def problems(draw, most_layers, most_candidates):
    """Values over many orders of magnitude or with many ties, weights, and a budget that something fits."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = draw(st.integers(1, most_layers)), draw(st.integers(1, most_candidates))
    weights = rng.integers(0, 20, shape).astype(float)
    if draw(st.booleans()):
        values = rng.integers(0, 4, shape).astype(float)
    else:
        values = rng.random(shape) * 10.0 ** rng.uniform(-8, 8, (shape[0], 1))
    budget = rng.uniform(weights.min(1).sum(), weights.max(1).sum() + 1)
    return values, weights, budget


@settings(deadline=None, max_examples=300)
@given(problems(5, 5))
def test_no_choice_is_better(problem):
    values, weights, budget = problem
    choices = product(range(values.shape[1]), repeat=len(values))
    best = min(total(values, choice) for choice in choices if total(weights, choice) <= budget)
    found = allocate(values, weights, budget)
    assert total(weights, found) <= budget
    assert total(values, found) <= best * (1 + 1e-12)


@settings(deadline=None, max_examples=100)
@given(problems(60, 13), st.data())
def test_one_candidate_for_all_layers_is_never_better(problem, data):
    values, weights, _ = problem
    uniform = data.draw(st.integers(0, values.shape[1] - 1))
    budget = weights[:, uniform].sum()
    for exact in (False, True):
        found = allocate(values, weights, budget, exact)
        assert total(weights, found) <= budget
        assert total(values, found) <= values[:, uniform].sum()


def test_many_sums_are_thinned_and_stay_close_to_the_bound():
    rng = np.random.default_rng(1)
    values, weights = rng.random((200, 8)).cumsum(1)[:, ::-1], rng.random((200, 8)).cumsum(1)
    budget = weights.mean(1).sum()
    found = allocate(values, weights, budget)
    # At any price, the best layer by layer is a lower bound.
    bounds = [(values + price * weights).min(1).sum() - price * budget for price in np.linspace(0.1, 4, 400)]
    assert total(weights, found) <= budget
    assert max(bounds) <= total(values, found) <= 1.001 * max(bounds)


def test_a_budget_that_nothing_fits_is_refused():
    with pytest.raises(ValueError, match="the lightest candidates weigh 3, more than 2"):
        allocate(np.ones((2, 2)), np.array([[1.0, 5.0], [2.0, 2.0]]), 2.0)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_refused(wrong):
    with pytest.raises(ValueError, match="not finite"):
        allocate(np.array([[wrong, 1.0], [2.0, 1.0]]), np.array([[1.0, 2.0], [1.0, 2.0]]), 3.0)
