"""The background thread of asynchronous averaging. Each worker has one, and only it uses the channel.

During training
    active (odd rank)     after each step of its own: send ASK with x to a passive worker; absorb the ANSWER. One ASK is in
                          flight at a time.
    passive (even rank)   on ASK: send ANSWER with its own x. An ASK that comes before its first step, or after it loaded a
                          state, waits for the next step.

All workers end together. A worker that is done early goes on averaging with the others:
    1. an active worker that is done sends FINISHED to all passive ones, and goes on asking at its usual pace;
    2. a passive worker that is done, and has FINISHED from all active ones, sends FINISHED to all of them;
    3. an active worker that has FINISHED from all passive ones, and nothing in flight, sends GOODBYE and stops;
    4. a passive worker stops when it has GOODBYE from all active ones.

Errors. Every worker is connected to all workers of the other side, so these notice at once when it dies. A worker that notices
a death, or fails itself, sends the reason to its partners (FAILURE) and hangs up; they pass it on. The next optimizer step
raises the error, and so does any call that waits for the thread. The thread is a daemon: the process can exit, and partners
notice.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from enum import IntEnum
from functools import partial

import torch
from torch import Tensor

from ...average.gossip.pairwise import Pairwise, PairwiseState
from ...comm import CommunicationError, Communicator, Message
from ...comm.exit import until_exit
from ...messages import error_text

END_SECONDS = 10.0  # for the thread to end: it may be sending to a partner that does not read
MAX_REASON_BYTES = 10_000  # of the message with the reason why a worker stops
DEFAULT_PACE_SECONDS = 0.1  # for a worker that has made fewer than two steps


class PairMessage(IntEnum):
    """The kinds of messages."""

    ASK = 1
    ANSWER = 2
    FINISHED = 3
    GOODBYE = 4
    FAILURE = 5


class PairwiseExchange:
    """Averages `state` with partners of the other side; see the module's text. All workers construct it together.

    Args:
        averager: chooses the next partner.
        state: the values of this worker.
        comm: connects the workers.
    """

    def __init__(self, averager: Pairwise, state: PairwiseState, comm: Communicator):
        self._averager, self._state, self._rank, self._size = averager, state, comm.rank, comm.size
        self._partners = averager.partners(comm.rank, comm.size)
        vector_bytes = state.layout.numel * state.layout.dtype.itemsize
        # A reason may take more bytes than a small model.
        self._channel = comm.open_channel(self._partners, max_bytes=max(vector_bytes, MAX_REASON_BYTES))
        self._serve = self._serve_active if averager.is_active(comm.rank) else self._serve_passive
        self._error: CommunicationError | None = None
        self._abort_reason: str | None = None
        self._pace_seconds = DEFAULT_PACE_SECONDS
        self._last_step: float | None = None
        self._flight = threading.Condition()  # guards the two below
        self._may_ask, self._is_in_flight = True, False
        self.start()

    # ---- called by the training ----

    def start(self) -> None:
        """Begin to average: for the first time, or after all workers have ended."""
        self._has_stepped = self._is_finished = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="thinwire-pairwise", daemon=True)
        self._thread.start()

    def after_step(self) -> None:
        """Tell the thread that new values were published."""
        now = time.monotonic()
        if self._last_step is not None:
            # A running mean, in which the last step counts a tenth.
            self._pace_seconds += 0.1 * (now - self._last_step - self._pace_seconds)
        self._last_step, self._has_stepped = now, True
        self._channel.wake()

    def finish(self) -> None:
        """Go on averaging until all workers are done, and end the thread."""
        self._is_finished = True
        self._channel.wake()
        self._ended.wait()
        # Before the join: a thread that failed may still be telling its partners why.
        self.check()
        self._thread.join()

    def close(self, error: str | None = None) -> None:
        """Wait for the end of the thread, and hang up.

        Args:
            error: why this worker stops early; all others raise an error with it. None if the thread has ended.
        """
        if error is not None:
            self._abort_reason = f"rank {self._rank} raised {error}"
            self._channel.wake()
        self._thread.join(END_SECONDS)
        self._channel.close()

    def drop(self, reason: str) -> None:
        """Stop early as in `close`, but wait for nothing. For the garbage collector."""
        self._abort_reason = reason
        self._channel.wake()

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        """Context in which this worker has no ASK in flight."""
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
        """Raise the thread's error, if it had one."""
        if self._error is not None:
            raise self._error

    # ---- the thread ----

    def _run(self) -> None:
        with until_exit(partial(self.drop, "the process has ended")):
            self._serve_and_tell()

    def _serve_and_tell(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # the training raises it
            reason = str(error) if isinstance(error, PeerFailed) else f"rank {self._rank}: {error_text(error)}"
            self._error = CommunicationError(f"rank {self._rank}: asynchronous averaging has stopped: {reason}")
            self._error.__cause__ = error
            self._end_flight()
            self._ended.set()  # the training raises the error now, while partners read why
            for peer in self._partners:
                with contextlib.suppress(CommunicationError):
                    self._channel.send(
                        peer,
                        PairMessage.FAILURE,
                        torch.tensor(list(reason.encode()[:MAX_REASON_BYTES]), dtype=torch.uint8, device="cpu"),
                    )
            self._channel.close()
        finally:
            self._ended.set()

    def _serve_active(self) -> None:
        done: set[int] = set()
        sent: Tensor | None = None
        was_told = False
        while not (self._is_finished and len(done) == len(self._partners) and sent is None):
            if self._is_finished and not was_told:
                was_told = self._tell_all(PairMessage.FINISHED)
            if sent is None and self._has_stepped and self._begin_flight():
                sent = self._ask()
            message = self._receive(self._partners, self._pace_seconds if self._is_finished and sent is None else None)
            if message is None:
                # A worker that is done makes no more steps, and asks at the pace of its past ones.
                self._has_stepped = self._has_stepped or (self._is_finished and self._state.published is not None)
            elif message.kind == PairMessage.FINISHED:
                done.add(message.source)
            elif message.kind == PairMessage.ANSWER and sent is not None:
                self._state.absorb(sent, self._vector(message))
                sent = None
                self._end_flight()
            else:
                raise _unexpected(message)
        self._tell_all(PairMessage.GOODBYE)

    def _begin_flight(self) -> bool:
        """Whether this worker may ask now; if so, the message counts as in flight."""
        with self._flight:
            self._is_in_flight = self._may_ask
            return self._may_ask

    def _end_flight(self) -> None:
        with self._flight:
            self._is_in_flight = False
            self._flight.notify_all()

    def _ask(self) -> Tensor | None:
        """Send x to the next partner and return it; None if a state was loaded since the last step."""
        self._has_stepped = False
        peer = self._averager.peer(self._rank, self._state.asked, self._size)
        x = self._state.ask()
        if x is None:
            self._end_flight()
        else:
            self._send(peer, PairMessage.ASK, x)
        return x

    def _serve_passive(self) -> None:
        left, finished, was_told = set(self._partners), set[int](), False
        asks: list[Message] = []
        while left or not self._is_finished:
            message = self._receive(left)
            if message is None:
                pass
            # A worker has one ASK in flight, so a second one is an error.
            elif message.kind == PairMessage.ASK and all(one.source != message.source for one in asks):
                asks.append(message)
            elif message.kind == PairMessage.FINISHED:
                finished.add(message.source)
            elif message.kind == PairMessage.GOODBYE and message.source in left:
                left.remove(message.source)
            else:
                raise _unexpected(message)
            while asks and (x := self._state.answer(self._vector(asks[0]))) is not None:
                self._send(asks.pop(0).source, PairMessage.ANSWER, x)
            if self._is_finished and len(finished) == len(self._partners) and not was_told:
                was_told = self._tell_all(PairMessage.FINISHED)

    def _vector(self, message: Message) -> Tensor:
        """The values of a message, which has as many as this worker."""
        layout = self._state.layout
        expected, got = layout.numel * layout.dtype.itemsize, message.payload.numel()
        if got != expected:
            raise CommunicationError(
                f"rank {message.source} sent {got} bytes, expected {expected}, {layout.numel} elements"
            )
        return message.payload.view(layout.dtype)

    def _tell_all(self, kind: PairMessage) -> bool:
        for peer in self._partners:
            self._send(peer, kind)
        return True

    def _send(self, peer: int, kind: PairMessage, x: Tensor | None = None) -> None:
        # If the peer has gone, `_receive` notices, once it has had its last message: that may say why.
        with contextlib.suppress(CommunicationError), self._state.clock("send"):
            self._channel.send(peer, kind, x)

    def _receive(self, sources: list[int] | set[int], timeout_seconds: float | None = None) -> Message | None:
        with self._state.clock("wait"):
            message = self._channel.receive(sources, timeout_seconds)
        if message is not None and message.kind == PairMessage.FAILURE:
            raise PeerFailed(bytes(message.payload.tolist()).decode(errors="replace"))
        if self._abort_reason is not None:
            raise PeerFailed(self._abort_reason)
        return message


def _unexpected(message: Message) -> CommunicationError:
    return CommunicationError(
        f"rank {message.source} sent a message of kind {message.kind} and {message.payload.numel()} bytes that does not "
        "belong here; do all workers run the same version?"
    )


class PeerFailed(Exception):
    """A reason to stop that came from another worker or from the training."""
