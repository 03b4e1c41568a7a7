"""Schedules: a number that changes while training, in place of a field's constant.

`TopK(GeometricWarmup(0.001, 5))` is an algorithm like any other. `resolve(algorithm, progress)` replaces every schedule in
it by its value at one moment. All workers count progress alike, so they all get the same value.
"""

from __future__ import annotations

import dataclasses
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from .algorithm import Algorithm, require

AlgorithmT = TypeVar("AlgorithmT", bound=Algorithm)


class Progress(NamedTuple):
    """How far training has come: rounds of the averager, and epochs as the training loop counts them."""

    step: int = 0
    epoch: int = 0


class Schedule(Algorithm, ABC):
    """A number as a function of progress. One that counts epochs says `unit = "epoch"`."""

    is_constant = False
    unit: str = "step"

    @property
    def follows_epochs(self) -> bool:
        """Whether it counts epochs, not steps."""
        return self.unit == "epoch"

    @property
    def extremes(self) -> tuple[float | int, ...]:
        """Values with the least and the greatest of all among them, if these are known: options are checked with them."""
        return ()

    @abstractmethod
    def at(self, progress: Progress) -> float | int:
        """The value at this moment."""


@dataclass(frozen=True, repr=False)
class GeometricWarmup(Schedule):
    """Moves from `start` to `final` by equal factors, over the first `num` epochs (or steps).

    The value in epoch (or step) e < num is `start * (final/start)^((e+1)/(num+1))`.

    With the defaults this is Deep Gradient Compression's warm-up of the ratio, `r^((e+1)/6)` over five epochs.

    Args:
        final: the value from epoch or step `num` on.
        num: how many epochs or steps the warm-up takes.
        start: the value before the first epoch or step.
        unit: "epoch" or "step".

    Raises:
        ValueError: values that are not positive, or an unknown unit.

    Source: Lin et al. 2018, Deep Gradient Compression, arXiv 1712.01887.

    Example:
        >>> import thinwire as tw
        >>> warmup = tw.schedule.GeometricWarmup(0.001)
        >>> [round(warmup.at(tw.schedule.Progress(epoch=e)), 4) for e in range(6)]
        [0.3162, 0.1, 0.0316, 0.01, 0.0032, 0.001]
    """

    final: float
    num: int = 5
    start: float = 1.0
    unit: str = "epoch"

    def __post_init__(self) -> None:
        for value in (self.start, self.final):
            require(_is_number(value) and value > 0, f"{self}: start and final must be positive numbers")
        require(isinstance(self.num, int) and self.num >= 0, f"{self}: num must be an integer, 0 or more")
        _check_unit(self)

    @property
    def extremes(self) -> tuple[float | int, ...]:
        return self.at(Progress()), self.final

    def at(self, progress: Progress) -> float:
        i = getattr(progress, self.unit)
        return self.final if i >= self.num else self.start * (self.final / self.start) ** ((i + 1) / (self.num + 1))


@dataclass(frozen=True, repr=False)
class Values(Schedule):
    """Piecewise constant: each value holds for `every` epochs (or steps), and the last one stays.

    Args:
        values: such as (0.25, 0.063, 0.015, 0.004, 0.001).
        every: how long each value holds.
        unit: "epoch" or "step".

    Raises:
        ValueError: no values, one that is no finite number, or an unknown unit.

    Example:
        >>> import thinwire as tw
        >>> bits = tw.schedule.Values((8, 4), every=100, unit="step")
        >>> bits.at(tw.schedule.Progress(step=99)), bits.at(tw.schedule.Progress(step=100))
        (8, 4)
    """

    values: tuple[float | int, ...]
    every: int = 1
    unit: str = "epoch"

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(self.values))  # a list has no hash
        require(len(self.values) > 0, "Values: give at least one value")
        require(all(map(_is_number, self.values)), f"{self}: each value must be a finite number")
        require(isinstance(self.every, int) and self.every >= 1, f"{self}: every must be a positive integer")
        _check_unit(self)

    @property
    def extremes(self) -> tuple[float | int, ...]:
        return self.values

    def at(self, progress: Progress) -> float | int:
        now: int = getattr(progress, self.unit)
        return self.values[min(now // self.every, len(self.values) - 1)]


def extremes(value: object) -> tuple[float | int, ...]:
    """The `extremes` of a schedule; nothing of another value.

    Example:
        >>> extremes(Values((8, 4))), extremes(4)
        ((8, 4), ())
    """
    return value.extremes if isinstance(value, Schedule) else ()


def resolve(algorithm: AlgorithmT, progress: Progress) -> AlgorithmT:
    """The algorithm at one moment: every schedule in it, also in a tuple, is replaced by its value.

    Example:
        >>> import thinwire as tw
        >>> resolve(tw.QSGD(bits=tw.schedule.Values((8, 4))), tw.schedule.Progress(epoch=1))
        QSGD(bits=4)
    """
    if algorithm.is_constant:
        return algorithm
    fields = {f.name: getattr(algorithm, f.name) for f in dataclasses.fields(algorithm)}
    changed = {name: new for name, old in fields.items() if (new := _resolved(old, progress)) is not old}
    return dataclasses.replace(algorithm, **changed)


def _resolved(value: object, progress: Progress) -> object:
    if isinstance(value, Schedule):
        return value.at(progress)
    if type(value) is tuple:
        items = tuple(_resolved(item, progress) for item in value)
        return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
    return resolve(value, progress) if isinstance(value, Algorithm) else value


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and abs(value) <= sys.float_info.max


def _check_unit(schedule: GeometricWarmup | Values) -> None:
    require(schedule.unit in Progress._fields, f"{schedule}: unit must be 'epoch' or 'step', got {schedule.unit!r}")
