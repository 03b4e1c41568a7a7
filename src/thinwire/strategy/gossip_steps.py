"""Gossip about parameters, attached to an optimizer through the hooks of its `step`. One step of the training loop:

    forward, backward    at z, this worker's model; with `overlap` a round is in flight meanwhile
    optimizer.step()
        1. pre-hook      push-sum: z -> x. With "combine_then_adapt" the round: x <- mixed
        2. adapt         the optimizer's own update
        3. post-hook     with "adapt_then_combine" the round: x <- mixed. With `overlap` the next round begins.
                         push-sum: x -> z

Outside of `optimizer.step` the model always holds z, so that whoever reads it (an evaluation, `state_dict`) needs to know
nothing of push-sum. Rounds and threads are those of `rounds.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..algorithm import require
from ..comm import Communicator, Ledger
from .mean_model import consensus_distance, holding_mean
from .rounds import ParameterRounds

ORDERS = ("combine_then_adapt", "adapt_then_combine")


class ParameterGossip:
    """What `gossip_parameters` returns: the averager at work on one model and its optimizer."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        rounds: ParameterRounds,
        overlap: bool,
        staleness: int,
        order: str,
    ):
        self._model, self._optimizer, self._rounds = model, optimizer, rounds
        self._overlap, self._staleness, self._combines_first = overlap, staleness, order == ORDERS[0]
        self._num_trainable = _count_trainable(optimizer)
        self._steps_since_begin = 0
        self._was_updated = False  # before the first update all workers agree: there is nothing to average
        self._holds_mean = self._took_part = False
        self._detach: list[Callable[[], Any]] = [
            optimizer.register_step_pre_hook(self._before_step).remove,
            optimizer.register_step_post_hook(self._after_step).remove,
        ]

    @property
    def ledger(self) -> Ledger:
        """Every byte that this worker sent and received, with the dense sizes beside them."""
        return self._rounds.comm.ledger

    @property
    def seconds(self) -> dict[str, float]:
        """Wall-clock seconds so far by phase: encode, wait, decode; with `overlap` the last two in a thread of their own."""
        return dict(self._rounds.state.clock.seconds)

    def consensus_distance(self, comm: Communicator | None = None) -> float:
        """How far workers' models are from their mean: `sqrt(1/W sum_i |z_i - mean|^2)`. Training goes on as if not asked.

        All workers call it. A round in flight is not in it.

        Args:
            comm: over which to measure; by default the strategy's own, whose ledger then counts it.
        """
        return consensus_distance([p for _, p in self._rounds.parameters], self._rounds.weight, self._comm(comm))

    @contextmanager
    def average_model(self, comm: Communicator | None = None) -> Iterator[None]:
        """Context in which the model holds the mean of all workers, and again its own bits after it, also on error.

        All workers enter it together. Floating-point buffers hold their mean too, other buffers rank 0's.

        Args:
            comm: over which to average; by default the strategy's own, whose ledger then counts it.
        """
        parameters, buffers = [p for _, p in self._rounds.parameters], list(self._model.buffers())
        with holding_mean(parameters, self._rounds.weight, buffers, self._comm(comm)):
            self._holds_mean = True
            try:
                yield
            finally:
                self._holds_mean = False

    def synchronize(self) -> None:
        """Absorb the round in flight, if there is one; all workers call it after the same step."""
        self._require_own_model("synchronize()")
        self._rounds.absorb()
        self._rounds.to_debiased()

    def set_epoch(self, epoch: int) -> None:
        """Tell schedules that count epochs which epoch begins. All workers call it.

        Raises:
            ValueError: on all workers together, if they name different epochs.
            CommunicationError: if one of them does not call it.
        """
        require(isinstance(epoch, int) and epoch >= 0, f"epoch must be an integer, 0 or more, got {epoch!r}")
        self._rounds.settle()
        self._rounds.comm.check_agreement({"epoch": epoch})
        self._rounds.averager.set_epoch(self._rounds.state, epoch)

    def state_dict(self) -> dict[str, Any]:
        """This worker's state (memory, push-sum weight, rounds done); each saves its own, with its model and optimizer.

        Absorbs the round in flight first, which changes the parameters: copy the model after this call, not before it.
        """
        self.synchronize()
        return {"averager": self._rounds.state.state_dict(), "was_updated": self._was_updated}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, for the same averager; the model and the optimizer load their own."""
        self._rounds.load_state_dict(saved["averager"])
        self._was_updated = saved["was_updated"]

    def detach(self) -> None:
        """Absorb the round in flight and leave model and optimizer as they were; all workers call it."""
        try:
            self.synchronize()
        finally:
            for undo in self._detach:
                undo()
            self._detach = []

    # ---- what the optimizer's hooks do ----

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        self._require_own_model("optimizer.step()")
        num_trainable = _count_trainable(optimizer)
        require(
            num_trainable <= self._num_trainable,
            f"the optimizer has {num_trainable} trainable parameters, and had {self._num_trainable} when it was attached; "
            "the new ones would drift apart: detach(), and call gossip_parameters again",
        )
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._before_update()
            return None
        others = {name: value for name, value in kwargs.items() if name != "closure"}
        return (args[0], self._around(closure), *args[2:]), others

    def _around(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure, which computes gradients at z, and the first time what else comes between backward and update."""
        pending = [self._before_update]

        def evaluate() -> Any:
            self._rounds.to_debiased()
            loss = closure()
            self._rounds.to_biased()
            while pending:
                pending.pop()()
            return loss

        return evaluate

    def _before_update(self) -> None:
        self._rounds.to_biased()
        if self._combines_first:
            self._combine()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        self._was_updated = self._took_part = True
        self._steps_since_begin += 1
        if not self._combines_first:
            self._combine()
        if self._overlap and not self._rounds.in_flight:
            self._rounds.begin()
            self._steps_since_begin = 0
        self._rounds.to_debiased()

    def _combine(self) -> None:
        if not self._overlap:
            if self._was_updated:
                self._rounds.run()
        elif self._steps_since_begin >= self._staleness:
            self._rounds.absorb()

    def watch(self, scaler: Any) -> None:
        """Take part in rounds also where a `GradScaler` skips the optimizer's step, which `scaler.update` then tells."""
        update = scaler.update

        def update_and_take_part(*args: Any, **kwargs: Any) -> None:
            if not self._took_part:
                self._before_update()
                self._after_step(self._optimizer, (), {})
            self._took_part = False
            update(*args, **kwargs)

        scaler.update = update_and_take_part
        self._detach.append(lambda: vars(scaler).pop("update"))

    def closes(self, comm: Communicator) -> None:
        """End `comm` together with the strategy."""
        self._detach.append(comm.close)

    def _comm(self, comm: Communicator | None) -> Communicator:
        if comm is not None:
            return comm
        self._rounds.settle()
        return self._rounds.comm

    def _require_own_model(self, what: str) -> None:
        require(not self._holds_mean, f"{what} inside average_model() would be lost with the mean; call it after the context")


def _count_trainable(optimizer: torch.optim.Optimizer) -> int:
    return sum(p.requires_grad for group in optimizer.param_groups for p in group["params"])
