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

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...algorithm import require
from ...average.base import Averager, NamedTensors
from ..model.models import NamedParameters, check_apart
from ..model.optimizer_step import Arguments, ScalerWatch, once_gradients_are_there
from ..own_model import OwnModelAttachment
from ..strategy import Runtime
from .rounds import ParameterRounds, RoundsState

if TYPE_CHECKING:
    from .gossip import Gossip


class ParameterGossip(OwnModelAttachment):
    """What `Gossip` attaches, which explains the configuration."""

    call = "Gossip"
    strategy: Gossip
    averager: Averager
    _record: RoundsState

    def __init__(self, strategy: Gossip, model: nn.Module, optimizer: Optimizer | None, runtime: Runtime):
        super().__init__(strategy, model, optimizer, runtime)
        _require_exact(strategy.averager, self.parameters)
        check_apart(self.call, self.parameters)

    def attach(self) -> None:
        """Connect the workers, and follow the optimizer's steps."""
        with self._attaching() as comm:
            self._follow(comm)
            self._rounds = ParameterRounds(self._live, self.averager, comm, self._seed, self._shards)
            self._state, self._record = self._rounds.state, self._rounds.record
            self._begin_rounds(self.averager)
            self._rounds.transaction = self._transaction
            self._on_detach(self._rounds.to_debiased)
            self._watch = ScalerWatch(self._scaler, self._optimizer, self._take_part)
            self._on_detach(self._watch.remove)

    @property
    def phases_in_step(self) -> tuple[str, ...]:
        """With overlap, a thread waits and decodes."""
        return ("encode",) if self.strategy.overlap else ("encode", "wait", "decode")

    @torch.inference_mode(False)
    def synchronize(self) -> None:
        """Absorb the round in flight, if there is one; all workers call it after the same step."""
        self._require_own_model("synchronize()")
        self._rounds.absorb()
        self._rounds.to_debiased()

    # ---- what the base asks for ----

    @torch.inference_mode(False)
    def state_dict(self) -> dict[str, Any]:
        """Memory, rounds done, push-sum's weight, and the change of the round in flight, which is saved and not absorbed.

        Not while messages of an elastic round fly, which may be given up.
        """
        self._require_decided(self._rounds.is_undecided)
        self._rounds.hold()
        return super().state_dict()

    def _loaded(self, redistributed: bool) -> None:
        self._rounds.loaded()

    def begin_round(self) -> None:
        """As in `AveragerAttachment`. With overlap, messages fly from here on."""
        super().begin_round()
        self._rounds.regrouped()
        if self.comm.is_elastic and self._record.was_updated:
            self._begin()

    def settle(self) -> None:
        """As in `AveragerAttachment`. In elastic rounds all workers call it together: it ends the round in flight."""
        if self.comm.is_elastic:
            self._rounds.hold()
        super().settle()

    def _averaged(self) -> list[tuple[Any, NamedTensors]]:
        return [(self._rounds.state, self._live.tensors())]

    def _share(self) -> None:
        def load(part: dict[str, Any]) -> None:
            self._optimizer.load_state_dict(part)
            self._rounds.loaded()

        super()._share()
        self._share_part("optimizer", self._optimizer.state_dict, load, is_common=False)

    @property
    def _weight(self) -> float:
        return self._rounds.weight

    def _ready(self) -> None:
        self._rounds.settle()

    def _finish(self) -> None:
        self.synchronize()

    def _abandon(self, error: BaseException) -> None:
        """Nothing to do: the round in flight ends in its own thread, and what attaching did is undone anyway."""

    # ---- one step of the optimizer ----

    def _checked_step(self, arguments: Arguments) -> Arguments:
        """A closure computes gradients at z; its first call also does what comes before the update."""
        pending = [self._before_update]

        def act() -> None:
            self._own_gradients.check(self._optimizer)
            try:
                self._rounds.to_biased()
                while pending:
                    pending.pop()()
            except BaseException:
                self._rounds.to_debiased()  # as callers that go on from the error read the model
                raise

        return once_gradients_are_there(arguments, act, before=self._rounds.to_debiased)

    def _before_update(self) -> None:
        self._rounds.to_biased()
        if self.strategy.combines_first:
            self._combine()

    def _after_step(self) -> None:
        self._record.was_updated = True
        self._watch.stepped()
        self._record.steps_since_begin += 1
        try:
            if not self.strategy.combines_first:
                self._combine()
            if not self.comm.is_elastic:  # there, the next round begins with its workers
                self._begin()
        finally:
            self._rounds.to_debiased()

    def _begin(self) -> None:
        """With overlap, send the parameters, unless a round is in flight."""
        if self.strategy.overlap and not self._rounds.in_flight:
            self._rounds.begin()
            self._rounds.to_debiased()
            self._record.steps_since_begin = 0

    def _take_part(self) -> None:
        """A round without an update."""
        self._before_update()
        self._end_of_step()

    def _combine(self) -> None:
        if not self.strategy.overlap:
            self._rounds.absorb()  # one that was saved in flight, by a run with overlap
            if self._record.was_updated:
                self._rounds.run()
        elif self._record.steps_since_begin >= self.strategy.staleness:
            self._rounds.absorb()


def _require_exact(averager: Averager, parameters: NamedParameters) -> None:
    """`Mean` replaces parameters by what it sent, which is float32."""
    double = [name for name, p in parameters if p.dtype in (torch.float64, torch.complex128)]
    require(
        not averager.traits.gives_one_mean or not double,
        f"Gossip: {averager} sends float32, and would round {'parameter ' + repr(double[0]) if double else ''} of "
        "float64; use Mix(Complete()), which carries float64 and has the same mean",
    )
