"""Messages with a tag, from one worker to another, in no order with the collectives.

Each tag has streams of its own (`native/wire/frame.hpp`), in which messages are numbered in the order of the calls. An empty
payload has a number too; the engine sends nothing for it.

    envelope   sender to receiver   1 byte: there is a message; so a receiver from any source sees whose is next
    payload    sender to receiver
    request    receiver to sender   1 byte: the memory for the payload is there

A payload travels at once, while no more than `UNASKED_BYTES` are on their way to a receiver that has not asked for them; else
after the request. So messages that nobody takes never fill the receiver's memory, and never stand in the way of others.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from ..background import Background
from ..handle import CommunicationError, Wait
from ..numbered import TaggedMessage
from .endpoint import Endpoint

MAX_TAG = (1 << 21) - 1
UNASKED_BYTES = 1 << 24  # to one peer; the engine keeps four times as much for it, of all kinds of messages
MANY_REQUESTS = 64
ENVELOPE, PAYLOAD, REQUEST = 1, 2, 3  # 0, of tag 0, are the collectives


class Tagged:
    """The messages with tags of one worker.

    Args:
        peers: all other workers.
        endpoint: moves the bytes.
        wait: waits for an operation of its engine.
        timeout_seconds: how long a receiver from any source waits.
    """

    def __init__(self, peers: list[int], endpoint: Endpoint, wait: Callable[[int], None], timeout_seconds: float):
        self._peers, self._engine, self._timeout = peers, endpoint.engine, timeout_seconds
        self._post, self._wait = endpoint.begin, wait
        self._sent: Counter[tuple[int, int]] = Counter()  # messages, by peer and tag
        self._received: Counter[tuple[int, int]] = Counter()
        self._requests: dict[int, list[tuple[int, int]]] = {peer: [] for peer in self._peers}  # operation, bytes
        self._many = dict.fromkeys(self._peers, MANY_REQUESTS)
        self._any: dict[int, Background] = {}  # by tag: receivers from any source, in order
        self._lock = threading.Lock()

    def start_send(self, memory: Tensor, peer: int, tag: int) -> Wait:
        """Send bytes, which may be none; returns a function that waits until they may be written to."""
        with self._lock:
            index = self._sent[peer, tag]
            self._sent[peer, tag] += 1
            is_early = self._unasked(peer, memory.numel()) + memory.numel() <= UNASKED_BYTES
            request = self._post([], [TaggedMessage(peer, _number(tag, REQUEST, index), _byte())])
            if is_early:
                self._requests[peer].append((request, memory.numel()))
            payload = TaggedMessage(peer, _number(tag, PAYLOAD, index), memory)
            envelope = TaggedMessage(peer, _number(tag, ENVELOPE, index), _byte())
            first = self._post([envelope, payload] if is_early else [envelope], [])
        if is_early:
            return lambda: self._wait(first)

        def when_asked() -> None:
            self._wait(first)
            self._wait(request)
            self._wait(self._post([payload], []))

        # The receiver may ask much later, so this waits in a thread of its own, which ends after the call.
        return Background("thinwire-send").submit(when_asked).wait

    def start_receive(self, memory: Tensor, tag: int, source: list[int]) -> Wait:
        """Receive exactly so many bytes from the peer in `source`, or from the first that sends: then it gets its rank."""
        if source:
            with self._lock:
                operation = self._receive(memory, source[0], tag)
            return lambda: self._wait(operation)
        waiting = self._any.setdefault(tag, Background("thinwire-any"))

        def receive() -> None:
            peer, operation = self._next(memory, tag)
            self._wait(operation)
            source.append(peer)

        return waiting.submit(receive).wait

    def close(self) -> None:
        for waiting in self._any.values():
            waiting.close()

    def _receive(self, memory: Tensor, peer: int, tag: int) -> int:
        index = self._received[peer, tag]
        self._received[peer, tag] += 1
        payload = TaggedMessage(peer, _number(tag, PAYLOAD, index), memory)
        envelope = TaggedMessage(peer, _number(tag, ENVELOPE, index), _byte())
        return self._post([TaggedMessage(peer, _number(tag, REQUEST, index), _byte())], [envelope, payload])

    def _next(self, memory: Tensor, tag: int) -> tuple[int, int]:
        """Wait for an envelope, and begin to receive what it announces: the peer, and the operation."""
        until = time.monotonic() + self._timeout
        while time.monotonic() < until:
            indices = {peer: self._received[peer, tag] for peer in self._peers}
            envelopes = [(peer, _number(tag, ENVELOPE, index)) for peer, index in indices.items()]
            try:
                found = self._engine.begun(envelopes, min(1.0, self._timeout))
            except RuntimeError as error:
                raise CommunicationError(str(error)) from None
            with self._lock:
                # Another thread may have taken that message meanwhile.
                if found >= 0 and self._received[(peer := envelopes[found][0]), tag] == indices[peer]:
                    return peer, self._receive(memory, peer, tag)
        raise CommunicationError(f"no rank sent a message with tag {tag} in {self._timeout:g} seconds")

    def _unasked(self, peer: int, more: int) -> int:
        """Bytes that are on their way to a peer that has not asked for them, as far as that has to be known."""
        requests = self._requests[peer]
        total = sum(num_bytes for _, num_bytes in requests)
        if total + more > UNASKED_BYTES or len(requests) >= self._many[peer]:
            requests[:] = [(operation, n) for operation, n in requests if not self._is_over(operation)]
            self._many[peer] = max(MANY_REQUESTS, 2 * len(requests))
            total = sum(num_bytes for _, num_bytes in requests)
        return total

    def _is_over(self, operation: int) -> bool:
        try:
            return self._engine.wait(operation, 0.0)
        except RuntimeError:
            return True  # with an error that others report


def _number(tag: int, kind: int, index: int) -> int:
    from ._engine import STREAM_SHIFT

    return (tag << 2 | kind) << STREAM_SHIFT | index


def _byte() -> Tensor:
    return torch.zeros(1, dtype=torch.uint8, device="cpu")
