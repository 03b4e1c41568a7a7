"""The metrics: their names and units, and whether higher is better."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import NoneType
from typing import NamedTuple

from .runs import Run

MEAN_MODEL = "mean_model_"
PREFERRED = ("accuracy", "bleu", "top5_accuracy", "perplexity", "loss")  # unless the summaries name one
NAMES = {"variance": "relative variance", "bleu": "BLEU", "top5_accuracy": "top-5 accuracy"}


class Metric(NamedTuple):
    """How to show a metric.

    Args:
        key: its name in a row of metrics.
        words: its name in a sentence.
        unit: such as "%"; empty without a unit.
        scale: factor from the row to the unit.
        higher_is_better: None if neither direction is better.
    """

    key: str
    words: str
    unit: str = ""
    scale: float = 1.0
    higher_is_better: bool | None = None

    @property
    def label(self) -> str:
        """The label of an axis or a column."""
        return f"{self.words} ({self.unit})" if self.unit else self.words

    @property
    def arrow(self) -> str:
        """An arrow in the better direction."""
        return {True: " ↑", False: " ↓", None: ""}[self.higher_is_better]

    def best(self, values: Sequence[float]) -> float | None:
        """The best of these numbers; None if neither direction is better."""
        if self.higher_is_better is None or not values:
            return None
        return max(values) if self.higher_is_better else min(values)


def metric(key: str) -> Metric:
    """The metric of that name in a row.

    Example:
        >>> metric("mean_model_test_top5_accuracy").label, metric("test_loss").arrow
        ("mean model's test top-5 accuracy (%)", ' ↓')
    """
    name = key.removeprefix(MEAN_MODEL)
    kind = name.removeprefix("test_")
    # Without "test", only these are measured on training data; others, such as the variance, on none.
    data = "test " if kind != name else "training " if kind in PREFERRED else ""
    words = ("mean model's " if key.startswith(MEAN_MODEL) else "") + data + NAMES.get(kind, kind.replace("_", " "))
    if kind.endswith("accuracy"):
        return Metric(key, words, "%", 100.0, True)
    better = {"bleu": True, "loss": False, "perplexity": False, "consensus_distance": False}.get(kind)
    return Metric(key, words, higher_is_better=better)


def on_test_sets(runs: Sequence[Run]) -> list[Metric]:
    """All metrics on test sets that these runs have, those of the mean model last."""
    keys = {key for run in runs for row in run.rows for key in row}
    tested = [key for key in keys if key.removeprefix(MEAN_MODEL).startswith("test_")]
    directions = {run.summary["metric"]: not run.summary["lower_is_better"] for run in runs if _is_directed(run)}

    def place(key: str) -> tuple[bool, int, str]:
        kind = key.removeprefix(MEAN_MODEL).removeprefix("test_")
        return (key.startswith(MEAN_MODEL), PREFERRED.index(kind) if kind in PREFERRED else len(PREFERRED), kind)

    found = [metric(key) for key in sorted(tested, key=place)]
    # Of a metric that is not known here, the data set says which direction is better.
    return [
        m._replace(higher_is_better=directions.get(m.key.removeprefix(MEAN_MODEL), m.higher_is_better)) for m in found
    ]


def _is_directed(run: Run) -> bool:
    return isinstance(run.summary.get("lower_is_better"), bool) and isinstance(run.summary.get("metric"), str)


def main_metric(runs: Sequence[Run], asked: str | None) -> Metric | None:
    """The metric for comparing runs: the requested one, or that of their summaries, or the first test metric.

    Raises:
        ValueError: no run has the requested metric.
    """
    known = on_test_sets(runs)
    if asked is None:
        counts = {m: sum(run.summary.get("metric") == m.key for run in runs) for m in known}
        # Of runs of several tasks, the metric of most; if none names one, the first.
        return max(known, key=lambda m: counts[m], default=None)
    if any(asked in row and isinstance(row[asked], (int, float, NoneType)) for run in runs for row in run.rows):
        return next((m for m in known if m.key == asked), metric(asked))
    names = ", ".join(m.key for m in known) or "none"
    raise ValueError(f"no run has the metric {asked!r}; test metrics that there are: {names}")


def number(row: dict, key: str) -> float:
    """A number of a row; NaN if a diverged run wrote null."""
    value = row[key]
    return float(value) if isinstance(value, (int, float)) else math.nan
