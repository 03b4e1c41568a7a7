"""The contract of a channel: messages between two workers, outside of the order of the collectives.

A communicator's operations are collectives in call order. A channel is for workers that keep no common order: anybody sends
to any of its `peers` at any time, and receives what comes next from whomever. `Communicator.open_channel(peers)` is itself
a collective; afterwards each worker sends from one thread and receives in one, perhaps the same; any thread may call `wake`.

Messages  A kind, which the user of the channel chooses from 1 on, and a payload of at most `max_bytes` bytes. From one
          worker to another they arrive in the order in which they were sent. `send` returns when the payload may be
          written to.
Peers     Only workers that know the run's secret are connected; see `tcp/handshake.py`. A peer that announces a larger
          payload, or takes longer than the time limit for a message that it has begun, counts as failed. The others stay.
Errors    `receive` names the peers from which messages are still expected, and raises a `CommunicationError` that names the
          peer if one of these has died or hung up, or gave no sign of life for the communicator's time limit. A worker gives
          signs of life while its channel is open, whatever its threads do, so that a peer may take as long as it likes to
          have something to say, but a stopped process is noticed. A line that is cut and comes back within the limit is no
          error.
Waiting   Every wait ends: by a message, by `wake`, by `timeout_seconds`, or by an error within the time limit.
Ledger    Counts the payload and what frames it, under "channel".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

HEADER_BYTES = 9  # int64 number of bytes of the payload, uint8 kind
MAX_BYTES = 1 << 30  # of a payload, unless the user of a channel knows better


class Message(NamedTuple):
    """What came, and from whom."""

    source: int
    kind: int
    payload: Tensor
    """(num_bytes,) uint8, the receiver's own; as it was allocated alone, it may be viewed as floats."""


class Channel(ABC):
    """See the module's text for the contract."""

    @abstractmethod
    def send(self, peer: int, kind: int, payload: Tensor | None = None) -> None:
        """Sends a message to `peer`.

        Args:
            peer: one of those with which the channel was opened.
            kind: 1..255.
            payload: a contiguous CPU tensor, of which the bytes are sent; None for no bytes.

        Raises:
            ValueError: the payload is larger than the channel's `max_bytes`.
            CommunicationError: the peer has died or hung up, or took nothing for the time limit.
        """

    @abstractmethod
    def receive(self, sources: Iterable[int], timeout_seconds: float | None = None) -> Message | None:
        """The next message of one of `sources`, in turn; None after `wake` or after `timeout_seconds`.

        Raises:
            CommunicationError: one of `sources` has died, has hung up, or was silent for the time limit.
        """

    @abstractmethod
    def wake(self) -> None:
        """Makes a `receive` under way, or else the next one, return None soon. Any thread may call it."""

    @abstractmethod
    def close(self) -> None:
        """Hangs up, once peers have what was sent, or after a few seconds. Calling it again does nothing."""
