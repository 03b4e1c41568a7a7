"""Rounds of an averager over parameters: one at a time, in place or while the training goes on.

    in place     `run`       encode, exchange, decode into the parameters; returns when the round is done
    in flight    `begin`     encode a copy of the parameters and send it
                 (a thread)  sleeps until messages come, decodes them, and leaves the change of the parameters
                 `absorb`    waits for the thread and adds the change to what the parameters hold by now

Both add the same bits. The thread lives for one round; half steps after the first (`PowerGossip`) and what happens inside a
node (`Hierarchical`) are done in it. It is a daemon, so that a worker may leave while its neighbours are silent.

Push-sum. Parameters are the biased x while a round or the optimizer works on them, and `z = x / w` at all other times:
`to_biased` and `to_debiased` turn one into the other in place. w is that of the rounds absorbed so far.
"""

from __future__ import annotations

import threading

import torch

from ..average.base import Averager, NamedTensors
from ..comm import Communicator, Handle


class ParameterRounds:
    """The rounds of one worker; see the module's text.

    Args:
        parameters: named parameters, changed in place; the same names and shapes on all workers.
        averager: how to agree.
        comm: connects the workers; no other thread may use it while a round is in flight, see `settle`.
        seed: of the averager's random numbers.
    """

    def __init__(self, parameters: NamedTensors, averager: Averager, comm: Communicator, seed: int):
        self.parameters = [(name, p.detach()) for name, p in parameters]
        self.averager, self.comm = averager, comm
        self.state = averager.init(self.parameters, comm, seed)
        self._changes: NamedTensors = []
        self._flight: Flight | None = None
        self._debias_factor, self._is_biased = 1.0, False

    @property
    def in_flight(self) -> bool:
        """Whether a round has been begun and not been absorbed."""
        return self._flight is not None

    @property
    def weight(self) -> float:
        """Push-sum's w of the rounds absorbed so far, 1.0 for all other averagers."""
        return 1.0 / self._debias_factor

    def run(self) -> None:
        """A whole round, in place."""
        self.to_biased()
        self.averager.step(self.state, self.parameters, self.comm).wait()
        self._commit()

    def begin(self) -> None:
        """Send the parameters as they are now."""
        self.to_biased()
        if not self._changes:
            self._changes = [(name, torch.empty_like(p, dtype=torch.float32)) for name, p in self.parameters]
        for (_, change), (_, p) in zip(self._changes, self.parameters, strict=True):
            change.copy_(p)
        handle = self.averager.step(self.state, self._changes, self.comm)
        for _, change in self._changes:
            change.zero_()  # so that it is the change alone that the round leaves here
        self._flight = Flight(handle, self._changes[0][1].device)

    def settle(self) -> None:
        """Wait until the round in flight has ended, so that the communicator is free; nothing is absorbed yet."""
        if self._flight is not None:
            self._flight.wait()

    def absorb(self) -> None:
        """Add the change of the round in flight, if there is one, to the parameters."""
        if self._flight is None:
            return
        self.settle()
        self.to_biased()
        for (_, p), (_, change) in zip(self.parameters, self._changes, strict=True):
            p.copy_(p + change)  # parameters of half precision are added to in float32
        self._flight = None
        self._commit()

    def to_biased(self) -> None:
        """z -> x = w z, for the optimizer."""
        if not self._is_biased:
            self._multiply(self.weight)
        self._is_biased = True

    def to_debiased(self) -> None:
        """x -> z = x / w, for the forward pass and for whoever reads the model."""
        if self._is_biased:
            self._multiply(self._debias_factor)
        self._is_biased = False

    def load_state_dict(self, saved: dict) -> None:
        """Restore the averager's state; what is in flight is dropped, since parameters are replaced too."""
        self.settle()
        self._flight = None
        self.state.load_state_dict(saved)
        self._debias_factor, self._is_biased = self.averager.debias_factor(self.state), False

    def _commit(self) -> None:
        self.averager.commit(self.state)
        self._debias_factor = self.averager.debias_factor(self.state)

    def _multiply(self, factor: float) -> None:
        if factor != 1.0:
            for _, p in self.parameters:
                p.mul_(factor)


class Flight:
    """A round that has been begun, waited for in a thread of its own."""

    def __init__(self, handle: Handle, device: torch.device):
        self._handle, self._device = handle, device
        self._error: BaseException | None = None
        self._ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        self._thread = threading.Thread(target=self._run, name="thinwire-round", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Block until the round has ended; raises what went wrong in it."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            if self._ready is None:
                self._handle.wait()
            else:
                self._wait_on_stream()
        except BaseException as error:  # for `wait`
            self._error = error

    def _wait_on_stream(self) -> None:
        """On a stream of its own, so that the training's kernels do not wait for messages."""
        stream = torch.cuda.Stream(self._device)
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            stream.wait_event(self._ready)
            self._handle.wait()
            stream.synchronize()
