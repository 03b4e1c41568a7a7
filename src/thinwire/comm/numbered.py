"""Messages that both sides number in the order of the calls, so that later steps of an operation find theirs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import NamedTuple

from torch import Tensor

from .buffers import as_bytes
from .handle import Wait


class TaggedMessage(NamedTuple):
    """One message: whom it goes to or comes from, its number among theirs, and the memory of its bytes."""

    peer: int
    number: int
    memory: Tensor


Post = Callable[[list[TaggedMessage], list[TaggedMessage]], Wait]
"""(sends, receives): start them; returns what waits for them."""


class Numbers:
    """Numbers the messages that a worker sends to each of the others, and those that it receives."""

    def __init__(self, size: int):
        self._sent, self._received = ([count() for _ in range(size)] for _ in range(2))

    def sending(self, tensors: dict[int, Tensor]) -> list[TaggedMessage]:
        """The next messages to some peers; those without bytes are not sent."""
        return [
            TaggedMessage(p, self.next_sent(p), as_bytes(tensor)) for p, tensor in tensors.items() if tensor.numel()
        ]

    def receiving(self, tensors: dict[int, Tensor]) -> list[TaggedMessage]:
        """The next messages from some peers, into these tensors."""
        return [TaggedMessage(p, self.next_received(p), as_bytes(t)) for p, t in tensors.items() if t.numel()]

    def next_sent(self, peer: int) -> int:
        """The number of the next message to a peer."""
        return next(self._sent[peer])

    def next_received(self, peer: int) -> int:
        """The number of the next message from a peer."""
        return next(self._received[peer])
