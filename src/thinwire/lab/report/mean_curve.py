"""The mean curve of several seeds, with its standard deviation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .metrics import number
from .runs import Run

Row = dict[str, Any]


class Curve(NamedTuple):
    """Means over seeds at each step that all of them logged, and the sample standard deviation of y (0 for one seed)."""

    x: np.ndarray
    y: np.ndarray
    std: np.ndarray


def curve(runs: Sequence[Run], x: Callable[[Row], float | None], y_key: str, scale: float = 1.0) -> Curve | None:
    """Mean of x and of `scale` times y at each step; None if runs share no step that has both.

    Args:
        runs: one for each seed.
        x: reads x from a row; None if the row has no x.
        y_key: key of y in the row; null, where a run diverged, leaves a gap.
        scale: factor of y.
    """
    by_step = [{row["step"]: (x(row), number(row, y_key)) for row in run.rows if y_key in row} for run in runs]
    shared = set.intersection(*({step for step, (at, _) in points.items() if at is not None} for points in by_step))
    if not shared:
        return None
    points_RS2 = np.array([[points[step] for step in sorted(shared)] for points in by_step], dtype=float)
    values = scale * points_RS2[:, :, 1]
    std = values.std(axis=0, ddof=1) if len(runs) > 1 else np.zeros(values.shape[1])
    return Curve(points_RS2[:, :, 0].mean(axis=0), values.mean(axis=0), std)
