"""A network: W workers on nodes of N, a link inside a node and one between nodes."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from ..algorithm import require, required
from ..options import require_number

_RATES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "": 1.0}


def parse_rate(text: str) -> float:
    """Bytes per second of a rate in bits per second, such as "1gbit", "100mbit" or "25Gb/s".

    Raises:
        ValueError: no positive number with such a unit.

    Example:
        >>> parse_rate("1gbit")
        125000000.0
    """
    found = re.fullmatch(r"([\d.]+(?:e[+-]?\d+)?)\s*([kmgt]?)(?:bit(?:/s)?|b/s|bps)", text.strip().lower())
    match = required(found, f"cannot read the rate {text!r}; write it in bits, such as 100mbit or 1gbit")
    rate = _number(match[1], text) * _RATES[match[2]] / 8
    require(rate > 0, f"a rate must be positive, got {text!r}")
    return rate


def parse_seconds(text: str) -> float:
    """Seconds of a time such as "0.5ms", "50us" or "0.1s"; without a unit, seconds.

    Raises:
        ValueError: no number of 0 or more with such a unit.

    Example:
        >>> parse_seconds("0.5ms")
        0.0005
    """
    found = re.fullmatch(r"([\d.]+(?:e[+-]?\d+)?)\s*(s|ms|us|)", text.strip().lower())
    match = required(found, f"cannot read the time {text!r}; write it such as 50us, 0.5ms or 0.1s")
    return _number(match[1], text) / _PER_SECOND[match[2]]


def _number(digits: str, text: str) -> float:
    try:
        number = float(digits)
    except ValueError:
        number = math.inf
    require(number < math.inf, f"cannot read the number in {text!r}; write it such as 0.5")
    return number


@dataclass(frozen=True)
class Link:
    """A full-duplex line: a message of n bytes takes `latency_seconds + n / bytes_per_second + message_seconds`.

    A line that is shaped by a token bucket takes `burst_bytes` of it for nothing after a pause.

    Args:
        bytes_per_second: the rate.
        latency_seconds: until a message begins to arrive.
        message_seconds: how long each message holds up the next one, beside its bytes: the processor's time for it.
        operation_seconds: from a worker's call to its first message, and from the last one to its answer, together.
        burst_bytes: what an idle line takes at once.

    Example:
        >>> Link.of("1gbit", "0.1ms").bytes_per_second
        125000000.0
    """

    bytes_per_second: float
    latency_seconds: float = 0.0
    message_seconds: float = 0.0
    operation_seconds: float = 0.0
    burst_bytes: float = 0.0

    def __post_init__(self) -> None:
        require_number("a link's rate", self.bytes_per_second, above=0)
        for name in ("latency_seconds", "message_seconds", "operation_seconds", "burst_bytes"):
            require_number(name, getattr(self, name), least=0)

    @classmethod
    def of(cls, rate: str, latency: str = "0s") -> Link:
        """A link from texts such as "1gbit" and "0.5ms"."""
        return cls(parse_rate(rate), parse_seconds(latency))


@dataclass(frozen=True)
class Network:
    """Workers on nodes. The workers of a node share its NIC; inside the node each has a line of its own.

    Args:
        workers: W.
        workers_per_node: N consecutive ranks share a node; must divide W.
        outer: the link between nodes.
        inner: the link inside a node.
        cores: how many cores the threads of a node's workers share; by default each thread has its own. Threads at work
            get equal parts of them. A fraction is allowed, for nodes that share a machine.
        uplinks: bytes per second of each node's line to the others, in both directions, where they differ from `outer`'s; empty
            if all are alike. Owners of `scatter_reduce` then have unequal shares, as in a layout of measured lines.

    Raises:
        ValueError: N does not divide W, the number of cores is not positive, or a line is missing or has no rate.
    """

    workers: int
    workers_per_node: int = 1
    outer: Link = field(default_factory=lambda: Link.of("1gbit", "0.1ms"))
    inner: Link = field(default_factory=lambda: Link.of("80gbit", "10us"))
    cores: float | None = None
    uplinks: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        require(self.workers >= 1, f"a network needs at least one worker, got {self.workers}")
        require(
            self.workers_per_node >= 1 and self.workers % self.workers_per_node == 0,
            f"{self.workers} workers cannot be nodes of {self.workers_per_node} each; it must divide them",
        )
        require(self.cores is None or self.cores > 0, f"a node needs cores, more than 0, got {self.cores}")
        require(
            not self.uplinks or (len(self.uplinks) == self.nodes and min(self.uplinks) > 0),
            f"uplinks must have a rate for each of {self.nodes} nodes, got {self.uplinks}",
        )

    @property
    def nodes(self) -> int:
        """L = W / N."""
        return self.workers // self.workers_per_node
