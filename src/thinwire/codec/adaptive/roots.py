"""Roots of increasing functions, many at once: Newton's method inside a shrinking bracket."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .cdf_integral import Array

NEWTON_STEPS = 20
MAX_STEPS = 150


def increasing_root(
    evaluate: Callable[[Array], Array],
    function: Callable[[Array], tuple[Array, Array]],
    points: Array,
    low: Array,
    high: Array,
    tolerance: Array,
) -> Array:
    """Solve `f(x) = 0` elementwise for f increasing on `[low, high]`.

    A Newton step that would leave the bracket, or that has no slope to go by, becomes a bisection; after 20 steps every
    other one is a bisection, which bounds the work whatever f does. A start that already satisfies `|f| <= tolerance`
    is returned unchanged.

    Args:
        evaluate: what f is computed from; gives `[m, n]` for `[n]` numbers x, and x itself in its first row. It takes nearly
            all of the time, and is not called again for roots that are found.
        function: gives `(f(x), f'(x))`, `f' >= 0`, for such points.
        points: those of the start, `low <= points[0] <= high`. They are overwritten.
        low, high: of the shape of x.
        tolerance: on `|f|`; broadcasts.

    Returns:
        The points of the roots; of an end of the bracket where f keeps its sign.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        for step in range(MAX_STEPS):
            x, (value, slope) = points[0], function(points)
            below = value < 0
            low, high = np.where(below, x, low), np.where(below, high, x)
            middle = (low + high) / 2
            # Between neighbouring floats nothing lies.
            moves = (np.abs(value) > tolerance) & (low < middle) & (middle < high)
            if not moves.any():
                break
            newton = x - value / slope  # without slope it is infinite or NaN, and fails the comparison below
            usable = (newton > low) & (newton < high)
            if step >= NEWTON_STEPS and step % 2:
                usable[...] = False
            points[:, moves] = evaluate(np.where(usable, newton, middle)[moves])
    return points
