"""What gossip and local updates share: each worker has a model of its own, and one optimizer steps on it."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar
from weakref import finalize

import torch
from torch import nn
from torch.optim import Optimizer

from ..algorithm import require
from ..comm import Communicator
from .attached import BESIDE
from .base import Attachment, AveragerAttachment
from .model.ddp import DdpRefusal, unwrapped
from .model.live_parameters import LiveParameters
from .model.mean_model import consensus_distance, holding_mean
from .model.models import make_equal, trainable, trained_by, unexpanded, updated_by
from .model.optimizer_step import Arguments, makes_state_only, stepping_optimizer, without_autocast
from .model.own_gradients import OwnGradients
from .strategy import Averaging, Runtime


class OwnModelAttachment(AveragerAttachment):
    """A strategy at work whose workers have models of their own: what one can look at, and when the optimizer may step.

    A derived class calls `_follow` once the workers are connected, and says what comes after each step (`_after_step`).

    Args:
        strategy: the configuration.
        model: the model. One in DDP averages nothing itself until the strategy is detached; then all workers have the mean.
        optimizer: the one that steps on it.
        runtime: the arguments of `attach`; without a communicator and replicas, the workers are those of DDP, or all.

    Raises:
        ValueError: a part of the model is in DDP, or DDP has `static_graph`; or the optimizer is another model's or has no step
            hooks.
    """

    takes_all: ClassVar[bool] = False
    """Whether all trainable parameters of the model take part, or those that the optimizer updates."""

    _live: LiveParameters
    _numel: int  # elements that take part
    _own_gradients: OwnGradients
    _holds_mean = False

    def __init__(
        self,
        strategy: Averaging[Attachment],
        model: nn.Module,
        optimizer: Optimizer | None,
        runtime: Runtime,
    ):
        self._ddp, model = unwrapped(self.call, model, runtime.comm, runtime.replicas)
        require(
            self._ddp is None or not self._ddp.static_graph,
            f"{self.call}: DistributedDataParallel with static_graph fails in a backward pass that averages nothing; leave "
            "static_graph out",
        )
        if self._ddp is not None and runtime.comm is None:
            runtime = replace(runtime, replicas=self._ddp.process_group)
        self._optimizer = stepping_optimizer(self.call, optimizer)
        updated = updated_by(self.call, self._optimizer, model)
        super().__init__(strategy, model, trainable(model) if self.takes_all else updated, runtime)

    def consensus_distance(self, comm: Communicator | None = None) -> float:
        """How far workers' models are from their mean: `sqrt(1/W sum_i |z_i - mean|^2)`. Does not change the training.

        All workers call it. Messages in flight do not count yet. For 64 KB it estimates the distance within about 1 %; up to
        4,096 parameters it is exact.

        Args:
            comm: over which to measure; by default the strategy's own, whose ledger then counts it.
        """
        comm = self._before_look("consensus_distance()", comm)
        return consensus_distance([p for _, p in self.parameters], self._weight, comm, self._shards)

    def state_dict(self) -> dict[str, Any]:
        """As in `AveragerAttachment`. Not inside `average_model()`, where the model to save with it is the mean."""
        self._require_own_model("state_dict()")
        return super().state_dict()

    def load_state_dict(self, saved: dict[str, Any], among: tuple[int, int] = (0, 1)) -> None:
        """As in `AveragerAttachment`. Not inside `average_model()`."""
        self._require_own_model("load_state_dict()")
        super().load_state_dict(saved, among)

    @contextmanager
    def average_model(self, comm: Communicator | None = None) -> Iterator[None]:
        """Context in which the model holds the mean of all workers. It restores the worker's own bits, also on an error.

        All workers enter it together. Floating-point buffers hold their mean too, other buffers rank 0's. Messages in flight
        do not count yet. A worker trains, saves and loads its own state outside of it.

        Args:
            comm: over which to average; by default the strategy's own, whose ledger then counts it.
        """
        comm = self._before_look("average_model()", comm)
        parameters, buffers = [p for _, p in self._live.tensors()], list(self._model.buffers())
        with holding_mean(parameters, self._weight, buffers, comm):
            held, self._holds_mean = self._holds_mean, True  # within another such context it does already
            try:
                yield
            finally:
                self._holds_mean = held
                self._shards.reshard()  # first, because the shards are what is restored

    def end_with_mean(self) -> None:
        """Let `detach` leave the mean of all workers as the model, as it does for a model in DDP."""
        if not self.strategy.counts_commits:  # workers with a quorum end at different times
            self._on_detach(self._leave_mean)

    # ---- what a derived class defines ----

    @property
    def _weight(self) -> float:
        """The weight of this worker's model in the mean; 1.0 but for push-sum."""
        return 1.0

    def _before_look(self, what: str, comm: Communicator | None) -> Communicator:
        """Get ready for a look at the model through the call `what`; returns the communicator to use."""
        self._shards.reshard()
        self._live.check()
        if comm is None:
            self._ready()  # a round in flight uses the strategy's own
        return comm or self.comm

    def _checked_step(self, arguments: Arguments) -> Arguments:
        """Look at the gradients of a step once they are there; return the step's arguments."""
        return self._own_gradients.guard(self._optimizer, arguments)

    @abstractmethod
    def _after_step(self) -> None:
        """Called after each step of the optimizer."""

    # ---- what a derived class uses ----

    def _follow(self, comm: Communicator) -> None:
        """Make the workers' models equal, and follow the steps of the optimizer from now on."""
        make_equal(self._model, comm, parameters=[name for name, _ in self.parameters])
        self._live = LiveParameters(self.call, comm.rank, self._model, self.parameters, self._trained)
        self._numel = sum(t.numel() for _, t in self._live.tensors())
        self._own_gradients = OwnGradients(self._nonfinite, comm.rank, self._model.named_parameters(), self._shards)
        if self._ddp is not None:
            self._undo.enter_context(self._ddp.no_sync())
            self._ddp.require_forward_param_sync = False  # else the first forward pass sends buffers
            if self._ddp.process_group.size() > 1:  # one in a process group of its own has equal models
                self.end_with_mean()
        self._on_detach(DdpRefusal(self.call, self.parameters).end)
        after_step = torch.compiler.disable(
            without_autocast(lambda *_: None if makes_state_only() else self._end_of_step())
        )
        self._on_detach(self._optimizer.register_step_post_hook(after_step).remove)
        own = {id(p) for _, p in self.parameters}
        beside = [(name, p) for name, p in self._model.named_parameters() if p.requires_grad and id(p) not in own]
        self._beside = {id(p): name for name, p in beside}
        BESIDE.update(dict.fromkeys(self._beside, self))

    def _end_of_step(self) -> None:
        """Count a step, in which dense training would have averaged all that takes part, and do what comes after it."""
        self.comm.ledger.count_step(self._numel)
        with self.comm.ledger.counted_by_steps():
            self._after_step()

    def warn_beside(self, optimizer: Optimizer, parameters: Iterable[int]) -> None:
        """Called before a step of an optimizer on these parameters, by their `id`, which no strategy averages."""
        names = [self._beside[p] for p in parameters if p in self._beside]
        if not self.is_detached and self.comm.size > 1:
            self._advisor.say_once(
                f"{self.call}: another {type(optimizer).__name__} steps on parameters that nothing averages, such as "
                f"{names[0]!r}, so that each worker has its own; attach a strategy to that optimizer too"
            )

    @torch.no_grad()
    def _leave_mean(self) -> None:
        """Let all workers have the mean model, because DDP takes models to be equal; not after an error, which others lack."""
        if sys.exc_info()[1] is not None:
            return
        self._shards.reshard()  # else `tensors` would be those that FSDP has gathered
        tensors = [unexpanded(t) for t in (*self._model.parameters(), *self._model.buffers())]
        with self.average_model():
            means = [t.clone() for t in tensors]
        for t, mean in zip(tensors, means, strict=True):
            t.copy_(mean)

    def _trained(self) -> list[nn.Parameter]:
        trained = trained_by(self._optimizer)
        return [*trained, *(p for p in self._model.parameters() if p.requires_grad)] if self.takes_all else trained

    def _before_optimizer_step(self, optimizer: Optimizer, arguments: Arguments) -> Arguments:
        require(
            optimizer is self._optimizer,
            f"{self.call}: another {type(optimizer).__name__} steps on parameters that are attached with their own "
            f"{type(self._optimizer).__name__}, so that no averaging would follow; give all of them to one optimizer that "
            "wraps no other, attach each to a part of the model, or detach(), and attach the new one",
        )
        self._require_own_model("optimizer.step()")
        self._live.check()
        return self._checked_step(arguments)

    def _require_decided(self, is_undecided: bool) -> None:
        require(
            not is_undecided,
            f"{self.call}: messages of an elastic round are under way, which may be given up; save where comm.in_round is "
            "False, or call settle() on all workers before",
        )

    def _on_drop(self, end: Callable[..., object], *args: Any) -> None:
        """Call `end` if nobody refers to the strategy any more, such as after an error, so that no thread is left behind."""
        dropped = finalize(self, end, *args)
        dropped.atexit = False
        self._on_detach(dropped.detach)

    def _require_own_model(self, what: str) -> None:
        require(
            not self._holds_mean,
            f"{self.call}: {what} inside average_model() needs this worker's own model, and it is the mean; call it after the "
            "context",
        )
