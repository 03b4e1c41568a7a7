"""What becomes of changes that come late: rules of staleness for `Quorum`.

A worker measures its change from the anchor of some version. If s other rounds were committed since, its staleness is s.
"""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...algorithm import Algorithm
from ...options import require_integer, require_number
from .outer_sgd import OuterSGD, PortableSGD

Outer = Callable[[Iterable[nn.Parameter]], Any]


class Staleness(Algorithm, ABC):
    """A rule of staleness."""

    steps_by_change: ClassVar[bool] = False
    """Whether the outer optimizer takes a step for each change, or one for each round."""

    def factor(self, staleness: int) -> float:
        """What to multiply a change by that is `staleness` rounds old; 0.0 drops it, and its tokens do not count."""
        return 1.0

    def outer(self, outer: Outer, size: int) -> Outer:
        """The outer optimizer to use in place of `outer`, for `size` workers."""
        return outer


@dataclass(frozen=True, repr=False)
class PlainWeights(Staleness):
    """A late change counts as any other.

    Example:
        >>> PlainWeights().factor(staleness=3)
        1.0
    """


@dataclass(frozen=True, repr=False)
class Drop(Staleness):
    """A late change is dropped, as in Decoupled DiLoCo; the worker goes on from the newest anchor.

    Source: Douillard et al. 2026, Decoupled DiLoCo, arXiv 2604.21428.

    Example:
        >>> Drop().factor(0), Drop().factor(1)
        (1.0, 0.0)
    """

    def factor(self, staleness: int) -> float:
        return float(staleness == 0)


@dataclass(frozen=True, repr=False)
class CosineGate(Staleness):
    """A late change counts less, and from a cutoff on not at all.

        factor(s) = 1/2 (1 + cos(pi s / cutoff)) exp(-decay s)  for s < cutoff,  else 0

    The form is that of CGAD, whose constants are not published; the defaults are ours.

    Args:
        cutoff: rounds; lower => late changes are dropped earlier.
        decay: per round; higher => late changes count less.

    Raises:
        ValueError: a value out of range.

    Source: CGAD, arXiv 2605.09126.

    Example:
        >>> [round(CosineGate(cutoff=4).factor(s), 3) for s in range(5)]
        [1.0, 0.854, 0.5, 0.146, 0.0]
    """

    cutoff: int = 8
    decay: float = 0.0

    def __post_init__(self) -> None:
        require_integer("CosineGate: cutoff", self.cutoff, 1)
        require_number("CosineGate: decay", self.decay, least=0)

    def factor(self, staleness: int) -> float:
        if staleness >= self.cutoff:
            return 0.0
        return 0.5 * (1.0 + math.cos(math.pi * staleness / self.cutoff)) * math.exp(-self.decay * staleness)


@dataclass(frozen=True, repr=False)
class DelayedNesterov(Staleness):
    """Each change moves the anchor at once, but momentum changes only with every N-th, so that it amplifies no single one.

        b <- b + g;   anchor <- anchor - lr g / N;   every N-th change also
        v <- momentum v + b / N;   anchor <- anchor - lr momentum v;   b <- 0

    N changes move the anchor as one step of Nesterov SGD on their mean. `Local(outer=OuterSGD(...))` has lr and momentum.

    Args:
        period: N; None => the number of workers. Higher => steadier momentum.

    Raises:
        ValueError: a value out of range, or an outer optimizer without Nesterov momentum.

    Source: Liu et al. 2024, Asynchronous Local-SGD, arXiv 2401.09135.

    Example:
        >>> anchor = nn.Parameter(torch.tensor([1.0]))
        >>> optimizer = DelayedNesterov().outer(OuterSGD(lr=0.5, momentum=0.8), size=2)([anchor])
        >>> for change in (0.5, 0.25):
        ...     anchor.grad = torch.tensor([change])
        ...     _ = optimizer.step()
        >>> round(anchor.item(), 4), round(1.0 - 0.5 * (1 + 0.8) * 0.375, 4)  # and one step on the mean
        (0.6625, 0.6625)
    """

    steps_by_change: ClassVar[bool] = True

    period: int | None = None

    def __post_init__(self) -> None:
        require_integer("DelayedNesterov: period", self.period, 1, or_none=True)

    def outer(self, outer: Outer, size: int) -> Outer:
        if not (isinstance(outer, OuterSGD) and outer.nesterov and outer.momentum > 0):
            raise ValueError(
                f"DelayedNesterov: delays the momentum of outer=OuterSGD(momentum=...), with Nesterov, got {outer!r}"
            )
        return lambda anchors: DelayedNesterovSGD(anchors, outer.lr, outer.momentum, self.period or size)


class DelayedNesterovSGD(PortableSGD):
    """The optimizer of `DelayedNesterov`; each step applies one change.

    Args:
        anchors: what to change.
        lr, momentum: of the outer step.
        period: N.
    """

    def __init__(self, anchors: Iterable[nn.Parameter], lr: float, momentum: float, period: int):
        super().__init__(anchors, {"lr": lr, "momentum": momentum, "period": period})

    def _change(self, anchor: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        lr, momentum, period, state = group["lr"], group["momentum"], group["period"], self.state[anchor]
        if not state:
            state |= {"changes": 0, "sum": torch.zeros_like(anchor), "momentum": torch.zeros_like(anchor)}
        state["changes"] += 1
        state["sum"].add_(gradient)
        anchor.sub_(gradient * (lr / period))
        if state["changes"] % period == 0:
            state["momentum"].mul_(momentum).add_(state["sum"] * (1.0 / period))
            anchor.sub_(state["momentum"] * (lr * momentum))
            state["sum"].zero_()
