"""Rounds of an averager over parameters: one at a time, in place or while the training goes on.

    in place     `run`       encode, exchange, decode into the parameters; returns when the round is done
    in flight    `begin`     encode the parameters and send the messages
                 (a thread)  waits for the messages
                 `absorb`    waits for the thread, decodes the messages, and adds the change to the parameters as they are then

In flight on a GPU, a stream of its own (`thinwire.streams`) encodes a copy of the parameters, so that the training does not
wait, and decodes into that copy, which `absorb` adds.

To be saved in flight, a round is held: decoded into a change that `absorb` adds when it is due. So saving changes nothing.

On an elastic communicator a round in flight is committed before its change is added. One that is given up leaves no trace.

All ways add the same bits. Half steps after the first (`PowerGossip`) and the exchange in a node (`Hierarchical`) also run in
the thread.

Push-sum. While a round or the optimizer works on them, the parameters are the biased x. At all other times they are
`z = x / w`. `to_biased` and `to_debiased` convert between the two in place. w includes all rounds absorbed so far.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from ... import debug
from ...average.base import Averager, NamedTensors, Pending
from ...comm import CommunicationError, Communicator
from ...membership import WHOLE, State, check_state, nested, restart, shared
from ...streams import WorkStream, has_streams, refuse_capture
from ..flight import Flight
from ..model.live_parameters import LiveParameters
from ..model.shards import Replica
from ..transaction import Transaction, remember


@dataclass
class RoundsState(State):
    """What the rounds of one worker remember.

    Attributes:
        averager: the averager's state.
        was_updated: whether the parameters were ever updated; before, all workers agree, and there is nothing to average.
        steps_since_begin: steps of the optimizer since the round in flight began.
        change: of the round in flight, by parameter, once it is held. Where workers change, rounds in flight are dropped:
            they do not move the mean model, from which all go on.
        debias_factor: 1/w after the rounds absorbed so far.
    """

    averager: Any = nested()
    was_updated: bool = shared(default=False)
    steps_since_begin: int = restart(value=0, default=0)
    change: dict[str, Tensor] | None = restart(value=None, form=WHOLE, default=None)
    debias_factor: float = restart(value=1.0, default=1.0)


class ParameterRounds:
    """The rounds of one worker; see the module's text.

    Args:
        live: the parameters, changed in place; the same names and shapes on all workers.
        averager: how to agree.
        comm: connects the workers. What uses it otherwise waits for a round in flight.
        seed: of the averager's random numbers.
        shards: the workers that hold the other shards of the model.
    """

    def __init__(self, live: LiveParameters, averager: Averager, comm: Communicator, seed: int, shards: Replica):
        self.live, self.averager, self.comm, self._shards = live, averager, comm, shards
        tensors = live.tensors()
        self.state = check_state(averager.init(tensors, comm, seed), averager)
        averager.check_names([name for name, _ in tensors], comm.rank)
        self.record = RoundsState(self.state)
        device = tensors[0][1].device if tensors else torch.device("cpu")
        self._work, self._device, self.state.clock.device = WorkStream(device, self), device, device
        self._changes: NamedTensors = []
        self._flight: Flight[Callable[[NamedTensors], None]] | None = None
        self._go_back: Callable[[], None] = lambda: None  # to the averager's state before the elastic round in flight
        self._is_biased = False
        self.transaction: Transaction

    @property
    def is_undecided(self) -> bool:
        """Whether the elastic round in flight may still be given up."""
        return self._flight is not None and self.comm.is_elastic

    @property
    def in_flight(self) -> bool:
        """Whether a round has begun and has not been absorbed."""
        return self._flight is not None or self.record.change is not None

    @property
    def weight(self) -> float:
        """Push-sum's w after the rounds absorbed so far; 1.0 for all other averagers."""
        return 1.0 / self.record.debias_factor

    def run(self) -> None:
        """Do a whole round, in place. One that an elastic communicator gives up leaves no trace."""
        refuse_capture(self._device)
        self.to_biased()
        if not self.comm.in_round:  # this step has had no forward pass in training mode
            return
        self.comm.round_thread.drain()  # rounds of other strategies, which count in the same ledger
        tensors, has_all = self.live.tensors(), False
        # Only an elastic round can be given up, so only it needs copies.
        go_back = remember(self.state, [p for _, p in tensors]) if self.comm.is_elastic else lambda: None
        with self.transaction.attempt(), self.comm.ledger.counted_by_steps():
            self.averager.step(self.state, tensors, self.comm).wait()
            has_all = True
        if self.transaction.end(has_all):
            self._commit()
        else:
            go_back()

    def begin(self) -> None:
        """Send the parameters as they are now."""
        refuse_capture(self._device)  # before anything changes
        self.to_biased()
        self.comm.round_thread.drain()  # rounds of other strategies, which count in the same ledger
        if self.comm.is_elastic:
            self._go_back = remember(self.state)
        start = self._start_on_copies if has_streams(self._device) else self._start_in_place
        try:
            with self.comm.ledger.counted_by_steps():
                arrive = start()
        except CommunicationError as error:
            if not self.comm.is_elastic:
                raise
            # `absorb` meets the error as if it came with the messages, and the vote gives the round up.
            arrive = partial(_fail, error)
        self._flight = Flight(arrive, self._work, self.comm.round_thread)

    def _start_in_place(self) -> Pending:
        return self.averager.start(self.state, self.live.tensors(), self.comm)

    def _start_on_copies(self) -> Pending:
        """The round of a copy, which becomes the change; the stream must not read parameters that the training changes."""
        for (_, change), (_, p) in zip(self._change_buffers(), self.live.tensors(), strict=True):
            change.copy_(p)
        with self._work.after_caller():
            handle = self.averager.step(self.state, self._changes, self.comm)
            for _, change in self._changes:
                change.zero_()  # the round adds its change to this zero

        def arrive() -> Callable[[NamedTensors], None]:
            handle.wait()
            return self._add_changes

        return arrive

    def _change_buffers(self) -> NamedTensors:
        if not self._changes:
            self._changes = [
                (name, debug.empty(p.shape, dtype=torch.promote_types(p.dtype, torch.float32), device=p.device))
                for name, p in self.live.tensors()
            ]
        return self._changes

    def _add_changes(self, tensors: NamedTensors) -> None:
        for (_, p), (_, change) in zip(tensors, self._changes, strict=True):
            p.copy_(p + change)  # the sum of half precision and float32 is float32

    def settle(self) -> None:
        """Wait until the round in flight has ended, so that the communicator is free. Absorbs nothing yet."""
        with suppress(CommunicationError) if self.is_undecided else nullcontext():  # the vote will tell
            if self._flight is not None:
                self._flight.settle()

    def absorb(self) -> None:
        """Add the change of the round in flight, if there is one, to the parameters."""
        if not self.in_flight:
            return
        add_change = self._add_changes if self.record.change is not None else self._committed()
        if add_change is None:
            return
        self.to_biased()
        add_change(self.live.tensors())
        self._flight, self.record.change = None, None
        self._commit()

    def _committed(self) -> Callable[[NamedTensors], None] | None:
        """Wait for the round in flight. What is returned adds its change; None if the round was given up."""
        assert self._flight is not None
        add_change = None
        with self.transaction.attempt(), self.state.clock("blocked"):
            add_change = self._flight.wait()
        if self.transaction.end(add_change is not None):
            return add_change
        self._go_back()
        self._flight = None
        return None

    def to_biased(self) -> None:
        """z -> x = w z, for the optimizer."""
        if not self._is_biased:
            self._multiply(self.weight)
        self._is_biased = True

    def to_debiased(self) -> None:
        """x -> z = x / w, for the forward pass and for callers that read the model."""
        if self._is_biased:
            self._multiply(self.record.debias_factor)
        self._is_biased = False

    def hold(self) -> None:
        """Wait for the round in flight, and decode it into the change that `absorb` adds. Changes no parameters."""
        if self._flight is None:
            return
        add_change = self._committed()
        if add_change is None:
            return
        if not has_streams(self._device):  # there the round has decoded it into the buffers already
            for _, change in self._change_buffers():
                change.zero_()
            add_change(self._changes)
        self._flight, self.record.change = None, dict(self._changes)

    def loaded(self) -> None:
        """Go on from the record, which was loaded: the model holds z, and the change in flight is the one that was saved."""
        self._flight, self._is_biased = None, False
        if self.record.change is not None:
            for name, change in self._change_buffers():
                change.copy_(self.record.change[name])
            self.record.change = dict(self._changes)

    def regrouped(self) -> None:
        """Read push-sum's weight anew, after other workers have joined; the model holds z."""
        if self._flight is not None:
            return
        self.record.debias_factor = self.averager.debias_factor(self.state)

    def _commit(self) -> None:
        self._shards.commit(self.averager, self.state)
        self.record.debias_factor = self.averager.debias_factor(self.state)

    def _multiply(self, factor: float) -> None:
        if factor != 1.0:
            for _, p in self.live.tensors():
                p.mul_(factor)


def _fail(error: CommunicationError) -> NoReturn:
    raise error
