"""Measures a worker's line: how fast messages travel, how much time a step leaves them, and how long the worker waits.

A round sends message i, of b_i bytes, at time t_i. The messages i of all workers have arrived at a_i. The worker waits q
seconds in all, q_i of them before t_i. Without waiting it would have needed the last message at e = a_n - q. A message
without bytes takes L seconds. The bytes of messages i to k travel between t_i and a_k, so the line carries at least

    rate  >=  (b_i + ... + b_k) / (a_k - t_i - L)        for all i <= k

The largest of these bounds is taken, because a disturbance of a message makes its own bound smaller. It is the line's rate if
the worker waits. If not, messages have arrived before the worker looks, and the bound may be far too small. With f times its
bytes, a round ends at most w seconds after e if

    f  <=  rate (e + w - (t_i - q_i)) / (b_i + b_(i+1) + ...)        for all i

The least f of a few rounds counts, because a disturbance of computation makes f larger.
"""

from __future__ import annotations

import math
import time
from collections import deque
from statistics import median
from typing import NamedTuple

from ...codec.adaptive.base import LineMeasurement

_REMEMBERED = 4  # number of latest latencies, whose minimum counts


class SentMessage(NamedTuple):
    """When a message was sent, and when those of all workers had arrived, in seconds; its bytes; the number of collectives,
    one after another, that carried it; and how long the worker had waited in all when it was sent."""

    sent: float
    arrived: float
    num_bytes: int
    steps: int = 1
    waited: float = 0.0


class LineMeter:
    """The messages of one worker since the last look.

    Example:
        >>> meter = LineMeter()
        >>> meter.begin_round(waited=0.0, now=0.0)
        >>> meter.add(SentMessage(sent=1.0, arrived=3.0, num_bytes=200))  # 100 bytes a second
        >>> meter.commit()
        >>> meter.begin_round(waited=1.0)  # it was needed at 2.0
        >>> meter.take(wait_share=0.5, now=4.0)  # may wait for 2 s: 3 s are there for 200 bytes
        LineMeasurement(rate=100.0, slack=0.015, waited=0.5)
    """

    def __init__(self) -> None:
        self._messages: list[SentMessage] = []
        self._rate = 0.0
        self._left: list[tuple[float, int]] = []  # of each message: seconds until the last is needed, bytes from it on
        self._waits: list[float] = []  # of each round, without latency
        self._latencies: deque[float] = deque(maxlen=_REMEMBERED)
        self._committed = False
        self._waited = 0.0
        self._since: float | None = None

    def add(self, message: SentMessage) -> None:
        """Note a message that has arrived."""
        self._messages.append(message)

    def add_latency(self, seconds: float) -> None:
        """Note how long a collective of few bytes took."""
        self._latencies.append(seconds)

    def commit(self) -> None:
        """Note that the round has ended."""
        self._committed = True

    def discard(self, waited: float) -> None:
        """Forget the round.

        Args:
            waited: seconds that this worker has waited for others so far.
        """
        self._messages, self._committed, self._waited = [], False, waited

    def begin_round(self, waited: float, now: float | None = None) -> None:
        """Evaluate the previous round, if it was committed.

        Args:
            waited: seconds that this worker has waited for others so far.
            now: by the clock of `time.perf_counter`.
        """
        self._since = (time.perf_counter() if now is None else now) if self._since is None else self._since
        if not self._committed:
            return
        # In the order of sending, because `sent` is the first field.
        messages, latency = sorted(self._messages), min(self._latencies, default=0.0)
        if messages:
            waits = waited - self._waited
            needed = max(message.arrived for message in messages) - waits
            after = 0
            for i in reversed(range(len(messages))):
                total = 0
                for last in messages[i:]:
                    total += last.num_bytes
                    seconds = last.arrived - messages[i].sent - last.steps * latency
                    # The latency was measured at other times, and may exceed what this message took.
                    self._rate = max(self._rate, total / max(seconds, 1e-9))
                after += messages[i].num_bytes
                self._left.append((needed - messages[i].sent + max(0.0, messages[i].waited - self._waited), after))
            self._waits.append(max(0.0, waits - max(message.steps for message in messages) * latency))
        self._messages, self._committed, self._waited = [], False, waited

    def take(self, wait_share: float, now: float | None = None) -> LineMeasurement:
        """The measurement since the last call.

        Args:
            wait_share: the share of a round's time that the worker may wait.
            now: by the clock of `time.perf_counter`.

        Returns:
            All NaN if there was no round.
        """
        now = time.perf_counter() if now is None else now
        line = LineMeasurement(math.nan, math.nan, math.nan)
        if self._waits and self._since is not None and any(num_bytes for _, num_bytes in self._left):
            may_wait = wait_share * (now - self._since) / len(self._waits)
            slack = min((left + may_wait) / num_bytes for left, num_bytes in self._left if num_bytes)
            line = LineMeasurement(self._rate, slack, median(self._waits) / may_wait if may_wait else math.inf)
        self._rate, self._left, self._waits, self._since = 0.0, [], [], now
        return line
