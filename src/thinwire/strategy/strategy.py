"""The contract of strategies: frozen data that says what is averaged, and when; `attach` sets one to work on a model.

A strategy
    is compared, printed and parsed like every other algorithm; it holds all that must be the same on all workers;
    checks its options in `__post_init__`, once;
    says when its workers exchange messages (`rhythm`);
    attaches to a model and returns an `Attachment` (`base.py`), which has what changes while training.

What differs between processes, such as the communicator and the loss scaler, is an argument of `attach`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from .. import __version__
from ..algorithm import Algorithm, require
from ..average.base import Averager, averager_hint
from ..average.gossip.pairwise import Pairwise
from ..comm import Communicator, Group, Layout
from ..options import require_choice, require_integer, require_kind
from .nonfinite import POLICIES

if TYPE_CHECKING:
    from .base import Attachment

A_co = TypeVar("A_co", bound="Attachment", covariant=True)


@dataclass(frozen=True)
class Rhythm:
    """When the workers of a strategy exchange messages.

    Args:
        every: steps of the optimizer from one round of a fragment to the next.
        fragments: parts of the model that are exchanged at different steps.
        delay: steps during which the messages of a round fly; 0 where the training waits for them.
        in_backward: whether messages fly during the backward pass.
        copies: how many tensors of each parameter's size a round averages.
    """

    every: int = 1
    fragments: int = 1
    delay: int = 0
    in_backward: bool = False
    copies: int = 1


@dataclass(frozen=True)
class Runtime:
    """What is not configuration, but an argument of `attach`, which explains the fields.

    Raises:
        ValueError: a value of another type.
    """

    comm: Communicator | None = None
    replicas: Group | None = None
    scaler: Any = None
    seed: int = 0
    layout: Layout | Callable[[Communicator], Layout] | None = None

    def __post_init__(self) -> None:
        hint = "; give a process group as replicas="
        require_kind("comm", self.comm, Communicator, "a communicator of thinwire", or_none=True, hint=hint)
        require_kind("scaler", self.scaler, torch.amp.GradScaler, "a torch.amp.GradScaler", or_none=True)
        require_kind("seed", self.seed, int, "an integer")


@dataclass(frozen=True, repr=False, kw_only=True)
class Strategy(Algorithm, ABC, Generic[A_co]):
    """What is averaged, and when; see the module's text. `A_co` is the type of the strategy at work.

    Args:
        on_nonfinite: what to do about a step whose gradient is infinite or NaN: "skip" it, "raise" an error, or "apply" it.
        max_nonfinite: with "skip", how many such steps in a row are an error.

    Raises:
        ValueError: a value out of range.
    """

    on_nonfinite: str = "skip"
    max_nonfinite: int = 100

    def __post_init__(self) -> None:
        require_choice(f"{type(self).__name__}: on_nonfinite", self.on_nonfinite, POLICIES)
        require_integer(f"{type(self).__name__}: max_nonfinite", self.max_nonfinite, 1)

    def attach(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        comm: Communicator | None = None,
        replicas: Group | None = None,
        scaler: Any = None,
        seed: int = 0,
        layout: Layout | Callable[[Communicator], Layout] | None = None,
    ) -> A_co:
        """Set the strategy to work; `thinwire.attach` explains the arguments. A function as `layout` measures it."""
        self._require(
            not isinstance(model, Algorithm),
            f"the first argument is {model!r}; write the model first, such as attach(model, ..., {model!r})",
        )
        is_optimizer: bool = isinstance(model, Optimizer)
        self._require(
            isinstance(model, nn.Module),
            f"the model must be a module of torch.nn, got {type(model).__name__}"
            + ("; write the model first, and then the optimizer" if is_optimizer else ""),
        )
        self._require(
            not isinstance(optimizer, (Algorithm, str)),
            f"the second argument is the optimizer or None, got {optimizer!r}; write attach(model, optimizer, {optimizer!r})",
        )
        require_kind("optimizer", optimizer, Optimizer, "one of torch.optim", or_none=True)
        with torch.inference_mode(False):
            return self._attached(model, optimizer, Runtime(comm, replicas, scaler, seed, layout))

    @abstractmethod
    def _attached(self, model: nn.Module, optimizer: Optimizer | None, runtime: Runtime) -> A_co:
        """The strategy at work."""

    def options(self) -> dict[str, Any]:
        """The name of the class, all fields by name and the version of thinwire, as workers compare them."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"strategy": type(self).__name__} | values | {"thinwire": __version__}

    # ---- what a derived class uses ----

    def _require(self, condition: bool, message: str) -> None:
        require(condition, f"{type(self).__name__}: {message}")


@dataclass(frozen=True, repr=False)
class Averaging(Strategy[A_co]):
    """Base of the strategies that have an averager.

    Args:
        averager: how workers agree.
    """

    averager: Averager | Pairwise

    models_differ: ClassVar[bool] = True
    """Whether each worker has a model of its own."""

    sends_again: ClassVar[bool] = False
    """Whether workers exchange what they have done again, without new steps, after a round was given up."""

    def __post_init__(self) -> None:
        super().__post_init__()
        value: object = self.averager
        got = type(value).__name__ if isinstance(value, (nn.Module, Optimizer)) else repr(value)
        got += "; write the model first" if isinstance(value, nn.Module) else ""
        if isinstance(value, Optimizer):
            got += "; an optimizer comes right after the model, as in attach(model, optimizer, strategy)"
        got += f"; attach(model, optimizer, {value!r}) takes a strategy" if isinstance(value, Strategy) else ""
        self._require(
            isinstance(self.averager, (Averager, Pairwise)),
            averager_hint(self.averager) or f"averager must be an averager such as Mean(), got {got}",
        )

    @property
    @abstractmethod
    def rhythm(self) -> Rhythm:
        """When workers exchange messages."""

    @property
    def counts_commits(self) -> bool:
        """Whether workers take unequal numbers of steps, and progress is what rounds have merged (`committed_tokens`)."""
        return False

    @property
    def has_common_steps(self) -> bool:
        """Whether all workers take equally many steps between two rounds, so that they may come and go."""
        return self.averager.traits.has_rounds and not self.counts_commits

    def _require_rounds(self) -> None:
        """Check that the averager is one."""
        self._require(
            isinstance(self.averager, Averager),
            f"averager must be one that has rounds, such as Mean() or Mix(), got {self.averager!r}; Pairwise() goes into "
            "Asynchronous()",
        )
