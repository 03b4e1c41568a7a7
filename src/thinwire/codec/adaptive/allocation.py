"""Which candidate each layer gets: the multiple-choice knapsack problem, solved exactly.

    minimise  sum_l value[l, c_l]   subject to   sum_l weight[l, c_l] <= budget

For the least error under a budget of bytes, values are errors and weights are bytes. For the fewest bytes under a bound
on the error, they change places.

Method. A price p on weight turns the problem into one choice for each layer, the least `value + p weight`. The price at which
a choice within the budget and one above it cost the same gives a choice between the two, until there is none. That gives a
choice that fits, and a bound that no choice beats. What costs more than the gap between the two is left out. Dynamic
programming over the rest finds the best choice: after each layer it keeps the sums that no other sum beats in both value and
weight. `MAX_SUMS` limits how many; only then may the result fall short of the best, and it is never worse than the best
single candidate for all layers.

Source: Markov et al. 2022, L-GreCo, arXiv 2210.17357; Kellerer et al. 2004, Knapsack Problems, chapter 11.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...algorithm import require

Matrix = NDArray[np.float64]
Choice = NDArray[np.int64]

MAX_SUMS = 4096
_ROUNDING = 1e-12  # of sums in float64, relative


def allocate(values: Matrix, weights: Matrix, budget: float, exact: bool = True) -> Choice:
    """The choice of least value whose weight is within the budget.

    Args:
        values: what is to be small, (layers, candidates), not negative.
        weights: what is limited, (layers, candidates), not negative.
        budget: the most weight of all layers together.
        exact: whether dynamic programming looks for the best choice; without it the search for the price decides.

    Returns:
        The candidate of each layer, (layers,).

    Raises:
        ValueError: even the lightest candidates together exceed the budget, or a value is not finite.

    Example:
        >>> errors, num_bytes = np.array([[9.0, 1.0], [4.0, 3.0]]), np.array([[1.0, 2.0], [1.0, 2.0]])
        >>> allocate(errors, num_bytes, budget=3).tolist()
        [1, 0]
    """
    require(bool(np.isfinite(values).all() and np.isfinite(weights).all()), "a value or a weight is not finite")
    lightest = weights.min(1).sum()
    require(
        bool(lightest <= budget * (1 + _ROUNDING)),
        f"the lightest candidates weigh {lightest:.6g}, more than {budget:.6g}",
    )
    price, best = _priced(values, weights, budget)
    best = _filled(values, weights, budget, best)
    best = min([best, *_uniform(values, weights, budget)], key=lambda choice: sum_chosen(values, choice))
    return _exact(values, weights, budget, price, best) if exact else best


def sum_chosen(matrix: Matrix, choice: Choice) -> float:
    """The sum of what is chosen, one entry of each row."""
    return float(matrix[np.arange(len(choice)), choice].sum())


def _at(values: Matrix, weights: Matrix, price: float) -> Choice:
    """The best choice at a price of weight; the lightest of equals."""
    costs = values + price * weights
    ties = costs <= costs.min(1, keepdims=True) * (1 + _ROUNDING)
    choice: Choice = np.where(ties, weights, np.inf).argmin(1)
    return choice


def _priced(values: Matrix, weights: Matrix, budget: float) -> tuple[float, Choice]:
    """The lowest price at which a choice fits, and this choice."""
    above, price, most = _at(values, weights, 0.0), 0.0, budget * (1 + _ROUNDING)  # `above` exceeds the budget
    value_above, weight_above = sum_chosen(values, above), sum_chosen(weights, above)
    if weight_above <= most:
        return price, above
    within = np.where(weights <= weights.min(1, keepdims=True), values, np.inf).argmin(1)
    value_within, weight_within = sum_chosen(values, within), sum_chosen(weights, within)
    while True:
        # The price at which both cost the same. If nothing costs less there, no choice between them is best at any price.
        price = (value_within - value_above) / (weight_above - weight_within)
        middle = _at(values, weights, price)
        value, weight = sum_chosen(values, middle), sum_chosen(weights, middle)
        if value + price * weight >= (value_within + price * weight_within) * (1 - _ROUNDING):
            return price, within
        if weight <= most:
            within, value_within, weight_within = middle, value, weight
        else:
            above, value_above, weight_above = middle, value, weight


def _filled(values: Matrix, weights: Matrix, budget: float, choice: Choice) -> Choice:
    """Spend what is left: again and again the change that lowers the value most and still fits."""
    choice, rows = choice.copy(), np.arange(len(choice))
    for _ in range(2 * len(choice)):
        left = budget - sum_chosen(weights, choice)
        gains = values[rows, choice][:, None] - values
        gains[weights - weights[rows, choice][:, None] > left] = 0.0
        layer, candidate = np.unravel_index(gains.argmax(), gains.shape)
        if gains[layer, candidate] <= 0:
            break
        choice[layer] = candidate
    return choice


def _uniform(values: Matrix, weights: Matrix, budget: float) -> list[Choice]:
    """The best choice of one candidate for all layers, if one fits."""
    totals = np.where(weights.sum(0) <= budget * (1 + _ROUNDING), values.sum(0), np.inf)
    return [np.full(len(values), int(totals.argmin()))] if np.isfinite(totals.min()) else []


def _exact(values: Matrix, weights: Matrix, budget: float, price: float, best: Choice) -> Choice:
    """A better choice than `best`, or `best` if there is none."""
    costs = values + price * weights
    excess = costs - costs.min(1, keepdims=True)
    gap = sum_chosen(values, best) - (costs.min(1).sum() - price * budget)
    # A little more, so that rounding leaves out no candidate.
    gap = gap * (1 + 1e-9) + _ROUNDING * float(np.abs(costs.min(1)).sum())
    # Layers with few candidates left come first, so that the sums multiply late.
    order = np.argsort((excess <= gap).sum(1), kind="stable")
    lightest_after = weights[order].min(1)[::-1].cumsum()[::-1]

    # Sums of the layers so far: value, weight and excess; and for each layer where they came from.
    sums = np.zeros((3, 1))
    came_from: list[tuple[Any, Any]] = []
    for i, layer in enumerate(order):
        candidates = np.flatnonzero(excess[layer] <= gap)
        added = np.stack([values[layer], weights[layer], excess[layer]])[:, candidates]
        after = lightest_after[i + 1] if i + 1 < len(order) else 0.0
        grid = (sums[:, :, None] + added[:, None, :]).reshape(3, -1)
        # A sum that cannot lead below the value of `best`, or into the budget, is left out.
        possible = np.flatnonzero((grid[2] <= gap) & (grid[1] + after <= budget * (1 + _ROUNDING)))
        if not len(possible):
            return best
        # By weight, then by value: a sum is kept only where it beats all lighter ones.
        possible = possible[np.lexsort((grid[0, possible], grid[1, possible]))]
        before = np.minimum.accumulate(grid[0, possible])
        kept = possible[np.concatenate([[True], before[1:] < before[:-1]])]
        if len(kept) > MAX_SUMS:
            # In order of weight, one of every so many; the lightest and the heaviest stay.
            kept = kept[np.linspace(0, len(kept) - 1, MAX_SUMS).astype(np.int64)]
        sums = grid[:, kept]
        came_from.append((kept // len(candidates), candidates[kept % len(candidates)]))

    found, at = np.empty_like(best), int(sums[0].argmin())
    for layer, (parents, candidates) in zip(order[::-1], came_from[::-1], strict=True):
        found[layer], at = candidates[at], parents[at]
    return found if sum_chosen(values, found) < sum_chosen(values, best) else best
