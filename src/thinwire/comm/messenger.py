"""Messages from any worker to any other at any time, on top of a channel: what protocols without rounds are built on.

One thread sends, and another one receives. So a send may wait until its receiver reads, and no two workers wait for each other.

    post         any thread puts a message into the outbox; it never blocks
    on_message   called in the receiving thread for each message; messages of one peer come in the order of their posts
    on_lost      called once for each peer that has died, has hung up, or was silent for the communicator's time limit; and for
                 one that has said goodbye, after all its messages
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from torch import Tensor

from .base import Communicator
from .channel import Message
from .exit import until_exit
from .handle import CommunicationError

END_SECONDS = 10.0  # for the threads to end
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
        self._on_message, self._on_lost = on_message, on_lost
        self._peers = set(range(comm.size)) - {comm.rank}
        self._lost: set[int] = set()
        self._lock = threading.Lock()
        self._sent_bytes, self._sent_seconds = 0, 0.0
        self._channel = comm.open_channel(self._peers, max_bytes)
        self._outbox: SimpleQueue[tuple[int, int, Tensor | None] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=serve, name="thinwire-messages", daemon=True)
            for serve in (self._send_all, self._receive_all)
        ]

    def start(self) -> None:
        """Begin to send and to receive."""
        for thread in self._threads:
            thread.start()

    def post(self, peer: int, kind: int, payload: Tensor | None = None) -> None:
        """Send a message to a peer, unless it is lost or has said goodbye. The payload may not change afterwards."""
        self._outbox.put((peer, kind, payload))

    def say_goodbye(self) -> None:
        """Tell all peers that nothing more comes; their `on_lost` gets None once all that was posted before has come."""
        for peer in self._peers - self._lost:
            self.post(peer, GOODBYE)

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
        self._outbox.put(None)
        for thread in self._threads if wait else []:
            thread.join(END_SECONDS)

    def _send_all(self) -> None:
        for peer, kind, payload in iter(self._outbox.get, None):
            if peer not in self._lost:
                with until_exit():
                    self._send(peer, kind, payload)
        with self._lock:
            self._lost |= self._peers
        # So that the receiving thread sees that nobody is left.
        self._channel.wake()
        self._channel.close()

    def _send(self, peer: int, kind: int, payload: Tensor | None) -> None:
        began = time.perf_counter()
        try:
            self._channel.send(peer, kind, payload)
        except CommunicationError:
            return  # `_receive_all` notices, once all messages of the peer have come
        with self._lock:
            self._sent_seconds += time.perf_counter() - began
            self._sent_bytes += 0 if payload is None else payload.numel()

    def _receive_all(self) -> None:
        while sources := self._peers - self._lost:
            with until_exit(self._channel.wake):
                try:
                    self._handle(self._channel.receive(sources))
                except CommunicationError:
                    self._find_lost(sources)

    def _handle(self, message: Message | None) -> None:
        if message is None or message.source in self._lost:
            return
        if message.kind == GOODBYE:
            self._lose(message.source, None)
        else:
            self._on_message(message)

    def _find_lost(self, sources: set[int]) -> None:
        """Ask each peer apart which of them has failed; its last messages come first."""
        for peer in sorted(sources):
            try:
                while peer not in self._lost and (message := self._channel.receive([peer], 0.0)) is not None:
                    self._handle(message)
            except CommunicationError as error:
                self._lose(peer, str(error))

    def _lose(self, peer: int, reason: str | None) -> None:
        with self._lock:
            is_new = peer not in self._lost
            self._lost.add(peer)
        if is_new:
            self._on_lost(peer, reason)
