"""A network as a model: links, and a discrete-event engine that plays operations on them.

`thinwire.plan` predicts training steps with it, and a `LocalWorld` with a network tells its seconds by it.
"""

from __future__ import annotations

from .engine import Engine, Operation, Thread
from .links import Link, Network, parse_rate, parse_seconds
from .operations import Messages, Moves, Relay, Ring
from .replay import Replay
from .trace import Trace

__all__ = [
    "Engine",
    "Link",
    "Messages",
    "Moves",
    "Network",
    "Operation",
    "Relay",
    "Replay",
    "Ring",
    "Thread",
    "Trace",
    "parse_rate",
    "parse_seconds",
]
