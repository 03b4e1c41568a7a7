"""Messages from any worker to any other at any time, on top of channels: what protocols without rounds are built on.

Two threads send and receive. One uses a channel for messages to higher ranks, the other a channel for messages to lower ranks.
A send may block until its receiver reads. So on each channel a worker waits only for workers on one side of it, the last of
them never sends, and no circle of workers can wait for each other.

    post         any thread puts a message into the outbox; it never blocks
    on_message   called in one of the two threads for each message; messages of one peer come in the order of their posts
    on_lost      called once for each peer that has died, has hung up, or was silent for the communicator's time limit; and for
                 one that has said goodbye, which it does on both channels, so that all its messages come before
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from torch import Tensor

from .base import Communicator
from .channel import Channel, Message
from .handle import CommunicationError

LINGER_SECONDS = 5.0  # at most, so that peers can read the last messages
GOODBYE = 255  # a kind of message that users of this class do not send


class Messenger:
    """Connects this worker with all others; see the module's text. All workers construct it together.

    Args:
        comm: connects the workers. Its ledger counts the messages.
        max_bytes: of a payload.
        on_message: receives each message.
        on_lost: receives the rank of a lost peer, and why it is lost; None if it has said goodbye.
    """

    def __init__(
        self,
        comm: Communicator,
        max_bytes: int,
        on_message: Callable[[Message], None],
        on_lost: Callable[[int, str | None], None],
    ):
        self._rank, self._on_message, self._on_lost = comm.rank, on_message, on_lost
        self._peers = set(range(comm.size)) - {comm.rank}
        self._lost: set[int] = set()
        self._lock, self._is_closing = threading.Lock(), False
        self._sent_bytes, self._sent_seconds = 0, 0.0
        self._sides = [_Side(comm.open_channel(self._peers, max_bytes)) for _ in range(2)]  # to lower, to higher ranks
        self._threads = [
            threading.Thread(target=self._serve, args=(side,), name="thinwire-messages", daemon=True)
            for side in self._sides
        ]

    def start(self) -> None:
        """Begin to send and to receive."""
        for thread in self._threads:
            thread.start()

    def post(self, peer: int, kind: int, payload: Tensor | None = None) -> None:
        """Send a message to a peer, unless it is lost. The payload may not change afterwards."""
        side = self._sides[peer > self._rank]
        side.outbox.append((peer, kind, payload))
        side.channel.wake()

    def say_goodbye(self) -> None:
        """Tell all peers that nothing more comes; their `on_lost` gets None once all that was posted before has come."""
        for side in self._sides:
            side.outbox.extend((peer, GOODBYE, None) for peer in self._peers - self._lost)
            side.channel.wake()

    def seconds_to_send(self, num_bytes: int) -> float:
        """How long it takes to send a message to all peers, as measured so far."""
        with self._lock:
            return len(self._peers - self._lost) * num_bytes * self._sent_seconds / max(self._sent_bytes, 1)

    def forget(self, peer: int) -> None:
        """Treat a peer as lost from now on, without `on_lost`."""
        with self._lock:
            self._lost.add(peer)

    def close(self, wait: bool = True) -> None:
        """Hang up once everything that was posted has been sent; the threads do it, and by default the caller waits."""
        self._is_closing = True
        for side in self._sides:
            side.channel.wake()
        for thread in self._threads if wait else []:
            thread.join(2 * LINGER_SECONDS)

    def _serve(self, side: _Side) -> None:
        while not (self._is_closing and not side.outbox):
            while side.outbox:
                self._send(side, *side.outbox.popleft())
            if self._is_closing:
                break
            sources = self._peers - self._lost - side.ended
            try:
                self._handle(side, side.channel.receive(sources))
            except CommunicationError:
                self._find_lost(side, sources)
        side.channel.linger(LINGER_SECONDS)
        side.channel.close()

    def _send(self, side: _Side, peer: int, kind: int, payload: Tensor | None) -> None:
        if peer in self._lost:
            return
        began = time.perf_counter()
        try:
            side.channel.send(peer, kind, payload)
        except CommunicationError as error:
            self._lose(peer, str(error))
        with self._lock:
            self._sent_seconds += time.perf_counter() - began
            self._sent_bytes += 0 if payload is None else payload.numel()

    def _handle(self, side: _Side, message: Message | None) -> None:
        if message is None or message.source in self._lost:
            return
        if message.kind != GOODBYE:
            self._on_message(message)
            return
        side.ended.add(message.source)
        if all(message.source in other.ended for other in self._sides):
            self._lose(message.source, None)

    def _find_lost(self, side: _Side, sources: set[int]) -> None:
        """Ask each peer apart which of them has failed; its last messages come first."""
        for peer in sorted(sources):
            try:
                while peer not in side.ended and (message := side.channel.receive([peer], 0.0)) is not None:
                    self._handle(side, message)
            except CommunicationError as error:
                self._lose(peer, str(error))

    def _lose(self, peer: int, reason: str | None) -> None:
        with self._lock:
            is_new = peer not in self._lost
            self._lost.add(peer)
        if is_new and not self._is_closing:
            self._on_lost(peer, reason)


class _Side:
    """A channel and what is to be sent on it."""

    def __init__(self, channel: Channel):
        self.channel = channel
        self.outbox: deque[tuple[int, int, Tensor | None]] = deque()
        self.ended: set[int] = set()  # the peers that have said goodbye on it
