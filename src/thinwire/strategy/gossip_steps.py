"""Gossip about parameters, attached to the steps of an optimizer. One step of the training loop:

    forward, backward    at z, this worker's model; with `overlap` a round is in flight meanwhile
    optimizer.step()
        1. before        drop a gradient that is not finite; push-sum: z -> x;
                         with "combine_then_adapt" the round: x <- mixed
        2. adapt         the optimizer's own update
        3. after         with "adapt_then_combine" the round: x <- mixed; with `overlap` the next round begins;
                         push-sum: x -> z

Outside of `optimizer.step` the model always holds z, so that evaluation and `state_dict` need not know about push-sum.
`rounds.py` has the rounds and their threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..algorithm import require
from ..average.base import Averager, NamedTensors
from ..comm import Communicator, Group
from .gossip_base import GossipStrategy
from .live_parameters import LiveParameters
from .models import NamedParameters, make_equal, refuse_ddp, updated_by
from .optimizer_step import Arguments, ScalerWatch, closure_of, stepping_optimizer, with_closure
from .own_gradients import OwnGradients
from .rounds import ParameterRounds

ORDERS = ("combine_then_adapt", "adapt_then_combine")


class ParameterGossip(GossipStrategy):
    """What `gossip_parameters` returns, and what its arguments are explained at."""

    call = "gossip_parameters"
    averager: Averager

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        averager: Averager,
        *,
        comm: Communicator | None,
        overlap: bool,
        staleness: int,
        order: str,
        scaler: Any,
        on_nonfinite: str,
        max_nonfinite: int,
        seed: int,
        replicas: Group | None,
    ):
        refuse_ddp(self.call, model)
        optimizer = stepping_optimizer(self.call, optimizer)
        parameters = _taking_part(model, optimizer)
        _require_exact(averager, parameters)
        super().__init__(model, parameters, averager, comm, on_nonfinite, max_nonfinite, replicas)
        self._optimizer = optimizer
        self._overlap, self._staleness, self._combines_first = overlap, staleness, order == ORDERS[0]
        self._steps_since_begin = 0
        self._was_updated = False  # before the first update all workers agree: there is nothing to average
        with self._attaching() as comm:
            names = [name for name, _ in parameters]
            make_equal(
                model, comm, averager=averager, overlap=overlap, staleness=staleness, order=order, parameters=names
            )
            self._live = LiveParameters(self.call, comm.rank, model, parameters, lambda: _trained(optimizer))
            self._own_gradients = OwnGradients(self._nonfinite, comm.rank, model.named_parameters(), self._shards)
            self._rounds = ParameterRounds(self._live, averager, comm, seed, self._shards)
            self._state = self._rounds.state
            require(not overlap or not comm.is_elastic, f"{self.call}: overlap needs a fixed number of workers")
            self._begin_rounds(averager)
            self._rounds.transaction = self._transaction
            self._on_detach(self._rounds.to_debiased)
            self._on_detach(optimizer.register_step_post_hook(self._after_step).remove)
            self._watch = ScalerWatch(scaler, self._take_part)
            self._on_detach(self._watch.remove)

    def synchronize(self) -> None:
        """Absorb the round in flight, if there is one; all workers call it after the same step."""
        self._require_own_model("synchronize()")
        self._rounds.absorb()
        self._rounds.to_debiased()

    def state_dict(self) -> dict[str, Any]:
        """This worker's state (memory, push-sum weight, rounds done), under a key that names its rank.

        It first absorbs the round in flight, which changes the parameters: copy the model after this call, not before it.

        Returns:
            `{"rank3": {"identity": ..., ...}}`: tensors by parameter name, and plain values.
        """
        self.synchronize()
        return super().state_dict()

    # ---- what the base asks for ----

    def _own_state(self) -> dict[str, Any]:
        return {"averager": self._rounds.state.state_dict(), "was_updated": self._was_updated}

    def _load_own(self, saved: dict[str, Any]) -> None:
        self._rounds.load_state_dict(saved["averager"])
        self._was_updated = saved["was_updated"]

    def _deal(self, saved: list[dict[str, Any]]) -> dict[str, Any]:
        averager = self.averager.deal(
            [one["averager"] for one in saved], self._live.tensors(), self.comm.rank, self.comm.size
        )
        return {"averager": averager, "was_updated": any(one["was_updated"] for one in saved)}

    def begin_round(self) -> None:
        super().begin_round()
        self._rounds.regrouped()

    def _averaged(self) -> list[tuple[Any, NamedTensors]]:
        return [(self._rounds.state, self._live.tensors())]

    def _shared(self) -> dict[str, Any]:
        return {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "averager": self.averager.shared(self._rounds.state),
            "was_updated": self._was_updated,
        }

    def _adopt(self, shared: dict[str, Any]) -> None:
        self._model.load_state_dict(shared["model"])
        self._optimizer.load_state_dict(shared["optimizer"])
        self.averager.adopt(self._rounds.state, shared["averager"])
        self._was_updated = shared["was_updated"]

    @property
    def _weight(self) -> float:
        return self._rounds.weight

    def _before_look(self, what: str, comm: Communicator | None) -> Communicator:
        if comm is not None:
            return comm
        self._rounds.settle()  # a round in flight uses the strategy's own
        return self.comm

    def _ready(self) -> None:
        self._rounds.settle()

    def _finish(self) -> None:
        self.synchronize()

    def _abandon(self, error: BaseException) -> None:
        """Nothing to do: the round in flight ends in its own thread, and what attaching did is undone anyway."""

    # ---- one step of the optimizer ----

    def _before_optimizer_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments:
        self._require_own_optimizer(optimizer)
        self._require_own_model("optimizer.step()")
        self._live.check()
        closure = closure_of(args, kwargs)
        if closure is not None:
            return with_closure(args, kwargs, self._around(closure))
        self._own_gradients.check(optimizer)
        self._before_update()
        return args, kwargs

    def _around(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure, which computes gradients at z; its first call also does what comes before the update."""
        pending = [self._before_update]

        def evaluate() -> Any:
            self._rounds.to_debiased()
            loss = closure()
            self._own_gradients.check(self._optimizer)
            self._rounds.to_biased()
            while pending:
                pending.pop()()
            return loss

        return evaluate

    def _before_update(self) -> None:
        self._rounds.to_biased()
        if self._combines_first:
            self._combine()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._was_updated = True
        self._watch.stepped()
        self._steps_since_begin += 1
        if not self._combines_first:
            self._combine()
        if self._overlap and not self._rounds.in_flight:
            self._rounds.begin()
            self._steps_since_begin = 0
        self._rounds.to_debiased()

    def _take_part(self) -> None:
        """A round without an update."""
        self._before_update()
        self._after_step(self._optimizer, (), {})

    def _combine(self) -> None:
        if not self._overlap:
            if self._was_updated:
                self._rounds.run()
        elif self._steps_since_begin >= self._staleness:
            self._rounds.absorb()


def _trained(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def _taking_part(model: nn.Module, optimizer: torch.optim.Optimizer) -> NamedParameters:
    """The trainable parameters of the model that the optimizer updates; it may update no others."""
    named = updated_by(optimizer, model)
    own = {id(p) for _, p in named}
    others = [p for p in _trained(optimizer) if id(p) not in own]
    require(
        not others,
        f"gossip_parameters: {len(others)} of the optimizer's parameters are not the model's and would drift apart; put "
        "them into one module with it",
    )
    return named


def _require_exact(averager: Averager, parameters: NamedParameters) -> None:
    """`Mean` replaces parameters by what it sent, which is float32."""
    double = [name for name, p in parameters if p.dtype in (torch.float64, torch.complex128)]
    require(
        not averager.gives_one_mean or not double,
        f"gossip_parameters: {averager} sends float32, and would round {'parameter ' + repr(double[0]) if double else ''} of "
        "float64; use Mix(Complete()), which carries float64 and has the same mean",
    )
