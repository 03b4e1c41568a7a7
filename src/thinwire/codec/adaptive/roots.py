"""Roots of increasing functions, many at once: Newton's method inside a shrinking bracket."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

NEWTON_STEPS = 20
MAX_STEPS = 150


def increasing_root(
    function: Callable[[Tensor], tuple[Tensor, Tensor]], start: Tensor, low: Tensor, high: Tensor, tolerance: Tensor
) -> Tensor:
    """Solve `f(x) = 0` elementwise for f increasing on `[low, high]`.

    A Newton step that would leave the bracket, or that has no slope to go by, becomes a bisection; after 20 steps every
    other one is a bisection, which bounds the work whatever f does. A start that already satisfies `|f| <= tolerance`
    is returned unchanged.

    Args:
        function: gives `(f(x), f'(x))`, `f' >= 0`.
        start, low, high: tensors of one shape, `low <= start <= high`.
        tolerance: on `|f|`; broadcasts.

    Returns:
        The roots; an end of the bracket where f keeps its sign.
    """
    x = start
    for step in range(MAX_STEPS):
        value, slope = function(x)
        done = (value.abs() <= tolerance) | (high <= low)
        if done.all():
            break
        low, high = torch.where(value < 0, x, low), torch.where(value > 0, x, high)
        middle = low + (high - low) / 2
        newton = x - value / slope  # without slope it is infinite or NaN, and fails the comparison below
        usable = (newton > low) & (newton < high)
        if step >= NEWTON_STEPS and step % 2:
            usable = torch.zeros_like(usable)
        x = torch.where(done, x, torch.where(usable, newton, middle))
        stuck = (middle <= low) | (middle >= high)  # neighbouring floats: nothing lies between
        high = torch.where(stuck, low, high)
    return x
