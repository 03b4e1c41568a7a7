"""A channel on connections of our own: what `communicator.py` has for collectives, with an engine of its own.

A message is two of the engine's: a header of 9 bytes, and the payload, if there is one. From each peer, the header of the next
message is always expected, or else the payload that the last one announced. So the engine notices a peer's death and silence
while nobody receives, and a slow message keeps none from other peers waiting.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from ... import debug
from .. import channel, check
from ..buffers import as_bytes
from ..channel import HEADER_BYTES, Channel
from ..handle import CommunicationError
from ..numbered import Numbers
from .endpoint import CLOSE_SECONDS, Endpoint, Meeting

HEADER = struct.Struct("<qB")  # bytes of the payload, and kind


class Expected(NamedTuple):
    """What comes next from a peer: a header (kind 0), or the payload of a message."""

    operation: int
    memory: Tensor
    kind: int
    until: float


class TcpChannel(Channel):
    """Messages over connections of our own. All workers construct it together.

    Args:
        meeting, peers: see `Endpoint`.
        record: called with (messages, bytes_sent, bytes_received) for everything that is sent or received.
        max_bytes: of the payload of a message; a peer that announces more is treated as one that has failed.

    Raises:
        CommunicationError: a peer did not connect within the time limit.
    """

    def __init__(self, meeting: Meeting, peers: list[int], record: Callable[[int, int, int], None], max_bytes: int):
        self._rank, self._timeout = meeting.rank, meeting.timeout_seconds
        self._record, self._max_bytes = record, max_bytes
        self._endpoint = Endpoint(meeting, peers, is_channel=True)
        self._numbers = Numbers(meeting.size)
        # The engine's first message is a byte, so that all are connected when this returns.
        byte = torch.zeros(1, dtype=torch.uint8, device="cpu")
        first = [
            self._endpoint.begin(
                self._numbers.sending({peer: byte}), self._numbers.receiving({peer: torch.empty_like(byte)})
            )
            for peer in peers
        ]
        try:
            for operation in first:
                self._endpoint.wait(operation)
        except BaseException:
            self._endpoint.close(CLOSE_SECONDS)
            raise
        self._expected: dict[int, Expected] = {}
        self._lost: dict[int, str] = {}  # why
        self._last = -1  # who was heard
        for peer in peers:
            self._expect_header(peer)

    def send(self, peer: int, kind: int, payload: Tensor | None = None) -> None:
        body = torch.empty(0, dtype=torch.uint8, device="cpu") if payload is None else as_bytes(payload.detach())
        check.message(self._rank, peer, body.numel(), self._max_bytes)
        # `frombuffer` warns about memory that cannot be written to, such as `bytes`.
        header = torch.frombuffer(bytearray(HEADER.pack(body.numel(), kind)), dtype=torch.uint8)
        messages = [message for part in (header, body) for message in self._numbers.sending({peer: part})]
        self._endpoint.wait(self._endpoint.begin(messages, []))
        self._record(1, HEADER_BYTES + body.numel(), 0)

    def receive(self, sources: Iterable[int], timeout_seconds: float | None = None) -> channel.Message | None:
        deadline = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        order = sorted(set(sources), key=lambda peer: (peer <= self._last, peer))  # so that no peer is starved
        for peer in order:
            if peer in self._lost:
                raise CommunicationError(self._lost[peer])
        while True:
            left = max(0.0, min(1.0, deadline - time.monotonic()))  # now and then, Python looks for signals
            found = self._endpoint.engine.first([self._expected[peer].operation for peer in order], left)
            if found >= 0:
                message = self._take(order[found])
                if message is not None:
                    self._last = message.source
                    return message
            elif found == -2 or time.monotonic() >= deadline:
                return None
            for peer in order if found < 0 else []:
                if self._expected[peer].until < time.monotonic():  # also if it sends a byte now and then
                    self._lose(peer, f"receive from rank {peer} took more than {self._timeout:g} seconds")

    def wake(self) -> None:
        self._endpoint.engine.interrupt()

    def close(self) -> None:
        self._endpoint.close()

    def _expect(self, peer: int, memory: Tensor, kind: int, until: float) -> None:
        operation = self._endpoint.begin([], self._numbers.receiving({peer: memory}))
        self._expected[peer] = Expected(operation, memory, kind, until)

    def _expect_header(self, peer: int) -> None:
        self._expect(peer, torch.empty(HEADER_BYTES, dtype=torch.uint8, device="cpu"), 0, math.inf)

    def _take(self, peer: int) -> channel.Message | None:
        """What was expected has come; returns the message if it is whole."""
        operation, memory, kind, _ = self._expected[peer]
        try:
            self._endpoint.wait(operation)
        except CommunicationError as error:
            self._lose(peer, str(error))
        if kind == 0:
            num_bytes, kind = HEADER.unpack(bytes(memory.tolist()))
            if kind == 0 or not 0 <= num_bytes <= self._max_bytes:
                self._lose(
                    peer,
                    f"rank {peer} announced a message of kind {kind} and {num_bytes} bytes, expected at most "
                    f"{self._max_bytes}; do all workers run the same version and configuration?",
                )
            memory = debug.empty(num_bytes, dtype=torch.uint8, device="cpu")
            if num_bytes:
                self._expect(peer, memory, kind, time.monotonic() + self._timeout)
                return None
        self._expect_header(peer)
        self._record(0, 0, HEADER_BYTES + memory.numel())
        return channel.Message(peer, kind, memory)

    def _lose(self, peer: int, reason: str) -> NoReturn:
        self._lost[peer] = reason
        del self._expected[peer]  # which may be a large message
        self._endpoint.engine.lose(peer, reason)
        raise CommunicationError(reason)
