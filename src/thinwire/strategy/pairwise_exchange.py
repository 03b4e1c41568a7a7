"""The background thread of asynchronous averaging: one for each worker, the only one that uses the channel.

While training goes on
    active (odd)     after a step of its own: ASK a passive worker, with x; on ANSWER absorb it. One is in flight at a time.
    passive (even)   on ASK: ANSWER with its own x. Asks from before its first step wait for that.

The end comes for all at once, so that a worker that is done early keeps on averaging with those that are not:
    1. an active worker whose training is done says FINISHED to all passive ones, and goes on asking, at its pace so far;
    2. a passive one whose training is done, and to whom all active ones have said so, says FINISHED to all of them;
    3. an active one that has heard this from all, with nothing in flight, says GOODBYE and stops;
    4. a passive one stops when all active ones have said GOODBYE.

Errors. Every worker has a connection to all of the other side, so that these notice a death at once. Who notices one, or fails
itself, tells its partners why (FAILURE) and stops; they tell theirs. The training's next step, or whoever waits for the
thread, raises it. The thread is a daemon: it keeps no interpreter from leaving, and if that leaves, partners notice.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from enum import IntEnum

import torch
from torch import Tensor

from ..average.pairwise import Pairwise, PairwiseState
from ..comm import CommunicationError, Communicator, Message

LINGER_SECONDS = 2.0  # for partners to read why we stop
DEFAULT_PACE_SECONDS = 0.1  # of a worker that has not made two steps


class Kind(IntEnum):
    """What a message says."""

    ASK = 1
    ANSWER = 2
    FINISHED = 3
    GOODBYE = 4
    FAILURE = 5


class PairwiseExchange:
    """Averages what `state` holds with the partners of the other side; see the module's text. All workers make it.

    Args:
        averager: whom to ask.
        state: what this worker holds.
        comm: connects the workers.
    """

    def __init__(self, averager: Pairwise, state: PairwiseState, comm: Communicator):
        self._averager, self._state, self._rank, self._size = averager, state, comm.rank, comm.size
        self._partners = averager.partners(comm.rank, comm.size)
        self._channel = comm.open_channel(self._partners)
        self._serve = self._serve_active if averager.is_active(comm.rank) else self._serve_passive
        self._error: CommunicationError | None = None
        self._abort_reason: str | None = None
        self._pace_seconds, self._last_step = DEFAULT_PACE_SECONDS, None
        self._flight = threading.Condition()  # guards the two below
        self._may_ask, self._is_in_flight = True, False
        self.start()

    # ---- called by the training ----

    def start(self) -> None:
        """Begin to average; all workers have ended the last time, or this is the first."""
        self._has_stepped = self._is_finished = False
        self._thread = threading.Thread(target=self._run, name="thinwire-pairwise", daemon=True)
        self._thread.start()

    def after_step(self) -> None:
        """There is something new to average."""
        now = time.monotonic()
        if self._last_step is not None:
            self._pace_seconds += 0.1 * (now - self._last_step - self._pace_seconds)
        self._last_step, self._has_stepped = now, True
        self._channel.wake()

    def finish(self) -> None:
        """Wait until the training of all workers is done, while averaging goes on, and end the thread."""
        self._is_finished = True
        self._channel.wake()
        self._thread.join()
        self.check()

    def abort(self, reason: str) -> None:
        """End the thread, and with it those of all other workers, who raise an error with this reason."""
        self._abort_reason = reason
        self._channel.wake()
        self._thread.join(2 * LINGER_SECONDS)  # it may be in a message that its partner does not take

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        """Context in which nothing is in flight from this worker."""
        with self._flight:
            self._may_ask = False
            self._flight.wait_for(lambda: not self._is_in_flight)
        try:
            self.check()
            yield
        finally:
            self._may_ask = True
            self._channel.wake()

    def check(self) -> None:
        """Raise what went wrong in the thread."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Hang up; the thread has ended."""
        self._channel.close()

    # ---- the thread ----

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # the training raises it
            reason = error.reason if isinstance(error, Told) else f"rank {self._rank}: {error}"
            for peer in self._partners:
                with contextlib.suppress(CommunicationError):
                    self._channel.send(peer, Kind.FAILURE, torch.tensor(list(reason.encode()), dtype=torch.uint8))
            self._channel.linger(LINGER_SECONDS)
            self._error = CommunicationError(f"rank {self._rank}: asynchronous averaging has stopped: {reason}")
            self._error.__cause__ = error
        finally:
            self._land()

    def _serve_active(self) -> None:
        done, sent, was_told = set(), None, False
        while not (self._is_finished and len(done) == len(self._partners) and sent is None):
            if self._is_finished and not was_told:
                was_told = self._tell_all(Kind.FINISHED)
            if sent is None and self._has_stepped and self._take_off():
                sent = self._ask()
            message = self._receive(self._partners, self._pace_seconds if self._is_finished and sent is None else None)
            if message is None:
                # Who is done has no more steps, and asks at the pace of those it made.
                self._has_stepped = self._has_stepped or (self._is_finished and self._state.published is not None)
            elif message.kind == Kind.FINISHED:
                done.add(message.source)
            else:
                self._state.absorb(sent, _as_floats(message))
                sent = None
                self._land()
        self._tell_all(Kind.GOODBYE)

    def _take_off(self) -> bool:
        """Whether a message may fly; if so, it counts as flying from now on."""
        with self._flight:
            self._is_in_flight = self._may_ask
            return self._may_ask

    def _land(self) -> None:
        with self._flight:
            self._is_in_flight = False
            self._flight.notify_all()

    def _ask(self) -> Tensor:
        self._has_stepped = False
        peer = self._averager.peer(self._rank, self._state.asked, self._size)
        x = self._state.ask()
        self._send(peer, Kind.ASK, x)
        return x

    def _serve_passive(self) -> None:
        left, finished, asks, was_told = set(self._partners), set(), [], False
        while left or not self._is_finished:
            message = self._receive(left)
            if message is None:
                pass
            elif message.kind == Kind.ASK:
                asks.append(message)
            elif message.kind == Kind.FINISHED:
                finished.add(message.source)
            else:
                left.remove(message.source)
            while asks and self._state.published is not None:
                ask = asks.pop(0)
                self._send(ask.source, Kind.ANSWER, self._state.answer(_as_floats(ask)))
            if self._is_finished and len(finished) == len(self._partners) and not was_told:
                was_told = self._tell_all(Kind.FINISHED)

    def _tell_all(self, kind: Kind) -> bool:
        for peer in self._partners:
            self._channel.send(peer, kind)
        return True

    def _send(self, peer: int, kind: Kind, x: Tensor) -> None:
        with self._state.clock("send"):
            self._channel.send(peer, kind, x)

    def _receive(self, sources: list[int] | set[int], timeout_seconds: float | None = None) -> Message | None:
        with self._state.clock("wait"):
            message = self._channel.receive(sources, timeout_seconds)
        if message is not None and message.kind == Kind.FAILURE:
            raise Told(bytes(message.payload.tolist()).decode())
        if self._abort_reason is not None:
            raise Told(self._abort_reason)
        return message


class Told(Exception):
    """A reason to stop that was found elsewhere."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


def _as_floats(message: Message) -> Tensor:
    return message.payload.view(torch.float32)
