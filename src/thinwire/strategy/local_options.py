"""The options of `local_updates` that must be the same on all workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..algorithm import require
from ..average.inverse_norm import InverseNorm
from .fragments import Fragments


@dataclass(frozen=True)
class LocalOptions:
    """When workers exchange which parts, and how they merge; `local_updates` explains each field.

    Raises:
        ValueError: a value out of range.
    """

    every: int
    fragments: Fragments = 1
    delay: int = 0
    alpha: float = 0.0
    weights: InverseNorm | None = None
    pull: float | None = None
    state_every: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require_integer("every", self.every, 1)
        _require_integer("delay", self.delay, 0)
        if isinstance(self.fragments, int):
            _require_integer("fragments", self.fragments, 1)
        require(
            self.delay < self.every,
            f"local_updates: delay must be below every={self.every}, so that a round is merged before the next one of its "
            f"fragment, got {self.delay}",
        )
        require(
            isinstance(self.alpha, (int, float)) and 0 <= self.alpha < 1,
            f"local_updates: alpha must be at least 0 and below 1, got {self.alpha!r}",
        )
        require(
            self.weights is None or isinstance(self.weights, InverseNorm),
            f"local_updates: weights must be InverseNorm() or None, got {self.weights!r}",
        )
        require(
            self.pull is None or (isinstance(self.pull, (int, float)) and self.pull >= 0),
            f"local_updates: pull must be 0 or more, or None, got {self.pull!r}",
        )
        for key, period in self.state_every.items():
            _require_integer(f"state_every[{key!r}]", period, 1)

    def as_dict(self) -> dict[str, Any]:
        """All fields by name, as workers compare them."""
        return dict(vars(self))


def _require_integer(name: str, value: object, least: int) -> None:
    require(
        isinstance(value, int) and value >= least,
        f"local_updates: {name} must be an integer, {least} or more, got {value!r}",
    )
