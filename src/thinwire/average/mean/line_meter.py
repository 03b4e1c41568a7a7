"""What a worker sees of the line: how fast messages travel, and how much time a step leaves them.

A round sends messages i of b_i bytes at the times t_i; those of all workers have arrived at a_i. Computation ends at e,
when the worker begins to wait. Bytes of messages i to k travel between t_i and a_k, so the line carries at least

    rate  >=  (b_i + ... + b_k) / (a_k - t_i)        for all i <= k

and the largest of these is the rate: what disturbs a message makes its own estimate smaller. f times the bytes of a round
arrive w seconds after the end of computation, at most, if

    f  <=  rate (e + w - t_i) / (b_i + b_(i+1) + ...)        for all i

The least over a few rounds counts: what disturbs computation makes it longer.
"""

from __future__ import annotations

import math
import time
from typing import NamedTuple

from ...codec.adaptive.base import Pace


class Message(NamedTuple):
    """When a message was sent and when those of all workers had arrived, in seconds, and its bytes."""

    sent: float
    arrived: float
    num_bytes: int


class LineMeter:
    """The messages of one worker since the last look.

    Example:
        >>> meter = LineMeter()
        >>> meter.begin_round(waited=0.0, now=0.0)
        >>> meter.add(Message(sent=1.0, arrived=3.0, num_bytes=200))  # 100 bytes a second
        >>> meter.commit(now=3.0)
        >>> meter.begin_round(waited=1.0, now=4.0)  # computation ended at 2.0
        >>> meter.take(wait_share=0.25, now=4.0)  # may wait for 1 s: 2 s are there for 200 bytes
        Pace(rate=100.0, slack=0.01)
    """

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._rate = 0.0
        self._left: list[
            tuple[float, int]
        ] = []  # of each round: from a message to the end of computation, bytes from it on
        self._committed: float | None = None
        self._waited = 0.0
        self._since: float | None = None
        self._num_rounds = 0

    def add(self, message: Message) -> None:
        """Note a message that has arrived."""
        self._messages.append(message)

    def commit(self, now: float | None = None) -> None:
        """Note that the round has ended."""
        self._committed = time.perf_counter() if now is None else now

    def discard(self) -> None:
        """Forget the round."""
        self._messages.clear()
        self._committed = None

    def begin_round(self, waited: float, now: float | None = None) -> None:
        """Look at the round before, once it is committed.

        Args:
            waited: seconds that this worker has waited for others so far.
            now: by the clock of `time.perf_counter`.
        """
        self._since = (time.perf_counter() if now is None else now) if self._since is None else self._since
        if self._committed is not None and self._messages:
            messages, computed = sorted(self._messages), self._committed - (waited - self._waited)
            after = 0
            for i in reversed(range(len(messages))):
                total = 0
                for last in messages[i:]:
                    total += last.num_bytes
                    self._rate = max(self._rate, total / max(last.arrived - messages[i].sent, 1e-9))
                after += messages[i].num_bytes
                self._left.append((computed - messages[i].sent, after))
            self._num_rounds += 1
        if self._committed is not None:
            self._messages, self._committed, self._waited = [], None, waited

    def take(self, wait_share: float, now: float | None = None) -> Pace:
        """What was seen since the last call.

        Args:
            wait_share: of the time of a round that may be waited.
            now: by the clock of `time.perf_counter`.

        Returns:
            NaN for both if there was no round.
        """
        now = time.perf_counter() if now is None else now
        rate, slack = math.nan, math.nan
        if self._num_rounds and self._since is not None and any(num_bytes for _, num_bytes in self._left):
            may_wait = wait_share * (now - self._since) / self._num_rounds
            rate = self._rate
            slack = min((left + may_wait) / num_bytes for left, num_bytes in self._left if num_bytes)
        self._rate, self._left, self._num_rounds, self._since = 0.0, [], 0, now
        return Pace(rate, slack)
