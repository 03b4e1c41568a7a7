"""Measurements on a machine whose cores other programs share."""

from __future__ import annotations

from collections.abc import Callable


def always(differing: Callable[[], set], tries: int = 10) -> set:
    """What differs in each of several measurements; other programs share the cores, and disturb some of them."""
    left = differing()
    while left and (tries := tries - 1):
        left &= differing()
    return left
