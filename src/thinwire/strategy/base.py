"""What all strategies share: one averager at work on the parameters of one model.

A strategy
    owns the communicator, unless it was given one;
    attaches to its parameters, each of which takes part in one strategy only (`attached.py`), and detaches again;
    counts bytes (`ledger`) and time (`seconds`);
    tells schedules the epoch;
    saves its state under the worker's identity, and loads no other worker's;
    says what happens to steps that are not finite (`nonfinite.py`).

A class derived from it adds what is its own:
    `call`                       the public function that makes it, for messages
    `__init__`                   checks its options, and attaches within `self._attaching()`
    `_state`                     the averager's state
    `_own_state`, `_load_own`    what it saves
    `_ready`                     waits until the communicator is free for the caller
    `_finish`, `_abandon`        end what is in flight: with the other workers, or without them after an error
    `self._on_detach(undo)`      each hook that it sets registers how to take it off
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, ClassVar, Self

import torch
from torch import nn

from ..algorithm import Algorithm, require
from ..comm import Communicator, Ledger, ProcessGroupCommunicator
from .attached import register, release, require_unattached
from .identity import check_identity, describe_tensors, key_of
from .models import NamedParameters, check_model
from .nonfinite import NonfiniteSteps
from .optimizer_step import Arguments


class Strategy(ABC):
    """An averager at work on one model; see the module's text.

    Args:
        model: whose parameters take part.
        parameters: those that do, with their names.
        averager: how workers agree.
        comm: how to communicate; None for a process group of its own, which the strategy then closes.
        on_nonfinite: "skip", "raise" or "apply"; see `nonfinite.py`.
        max_nonfinite: with "skip", how many steps in a row may be skipped before an error.

    Raises:
        ValueError: a model on the meta device or sharded, parameters that overlap in memory, wrong options.
    """

    call: ClassVar[str]

    def __init__(
        self,
        model: nn.Module,
        parameters: NamedParameters,
        averager: Algorithm,
        comm: Communicator | None,
        on_nonfinite: str = "skip",
        max_nonfinite: int = 100,
    ):
        check_model(self.call, model)
        self.averager, self.parameters = averager, parameters
        self._model, self._comm, self._owns_comm = model, comm, comm is None
        self._nonfinite = NonfiniteSteps(self.call, on_nonfinite, max_nonfinite)
        self._state: Any = None
        self._undo = ExitStack()
        self._is_detached = False

    # ---- what users see ----

    @property
    def comm(self) -> Communicator:
        """The communicator at work."""
        require(self._comm is not None, f"{self.call}: not connected yet; the first backward pass connects the workers")
        assert self._comm is not None
        return self._comm

    @property
    def ledger(self) -> Ledger:
        """Every byte that this worker sent and received, with the dense sizes beside them."""
        return self.comm.ledger

    @property
    def seconds(self) -> dict[str, float]:
        """Wall-clock seconds so far, by phase."""
        return dict(self._state.clock.seconds)

    @property
    def num_skipped(self) -> int:
        """How many steps were skipped because they were not finite."""
        return self._nonfinite.num_skipped

    def set_epoch(self, epoch: int) -> None:
        """Tell schedules that count epochs, such as `GeometricWarmup`, which epoch begins. All workers call it.

        Raises:
            ValueError: on all workers together, if they name different epochs.
            CommunicationError: if one of them does not call it.
        """
        require(isinstance(epoch, int) and epoch >= 0, f"epoch must be an integer, 0 or more, got {epoch!r}")
        self._ready()
        self.comm.check_agreement({"epoch": epoch})
        self.averager.set_epoch(self._state, epoch)

    def state_dict(self) -> dict[str, Any]:
        """This worker's state, under a key that names its rank: workers differ, and each saves and loads its own.

        It may go into `torch.distributed.checkpoint`, which keeps one value for each key, or into a file for each worker.

        Returns:
            `{"rank3": {"identity": ..., ...}}`: tensors by parameter name, and plain values.
        """
        self._ready()
        return {key_of(self.comm.rank): {"identity": self._identity()} | self._own_state()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore what this worker's `state_dict` returned.

        Raises:
            ValueError: it is another worker's, another number of workers', or another configuration's.
        """
        self._ready()
        self._load_own(check_identity(self.call, saved, self._identity()))

    def detach(self) -> None:
        """Stop averaging, take off all hooks, and close the communicator if it is the strategy's own.

        Calling it again does nothing. While an exception is on its way, such as in a `finally`, it waits for nobody.
        """
        if self._is_detached:
            return
        self._is_detached = True
        error = sys.exc_info()[1]
        try:
            if error is None:
                self._finish()
            else:
                self._abandon(error)
        finally:
            release(self)
            self._undo.close()
            if self._owns_comm and self._comm is not None:
                self._comm.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.detach()

    # ---- what a derived class defines ----

    @abstractmethod
    def _own_state(self) -> dict[str, Any]:
        """What the strategy saves."""

    @abstractmethod
    def _load_own(self, saved: dict[str, Any]) -> None:
        """Restore what `_own_state` returned."""

    @abstractmethod
    def _ready(self) -> None:
        """Wait until the communicator is free for the caller."""

    @abstractmethod
    def _finish(self) -> None:
        """End what is in flight, together with the other workers."""

    @abstractmethod
    def _abandon(self, error: BaseException) -> None:
        """Break off what is in flight, because of `error`, without waiting for anyone."""

    def _before_optimizer_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments:
        """Called before each step of any optimizer over these parameters; returns the step's arguments."""
        return args, kwargs

    # ---- what a derived class uses ----

    @contextmanager
    def _attaching(self, group: Any = None) -> Iterator[Communicator]:
        """Context of all that attaching does: connects before, registers the parameters after, undoes it on an error.

        Args:
            group: the process group whose workers to connect, where no communicator was given; None for all.
        """
        require_unattached(self.call, self.parameters)
        if self._comm is None:
            self._comm = ProcessGroupCommunicator(group)
        try:
            yield self._comm
            register(self)
        except BaseException:
            self.detach()
            raise

    def _on_detach(self, undo: Callable[[], Any]) -> None:
        """Call `undo` when the strategy detaches; the last one first."""
        self._undo.callback(undo)

    def _identity(self) -> dict[str, Any]:
        return {
            "strategy": self.call,
            "rank": self.comm.rank,
            "world_size": self.comm.size,
            "averager": repr(self.averager),
            "tensors": describe_tensors(self.parameters),
        }
