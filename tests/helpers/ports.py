"""Ports that stay free until a test listens there."""

from __future__ import annotations

import random
import socket
from pathlib import Path

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")  # Linux's
EPHEMERAL = max(32768, int(RANGE.read_text().split()[0]) if RANGE.exists() else 0)


def free_port() -> int:
    """A TCP port where nobody listens. It lies below those that the system gives to connections and to port 0.

    So no other process takes it between its choice and its use, as it may take one that was free a moment ago.
    """
    chance = random.SystemRandom()  # tests seed the other one, in several processes alike
    while True:
        port = chance.randrange(EPHEMERAL // 2, EPHEMERAL)
        try:
            socket.create_server(("", port)).close()
        except OSError:
            continue
        return port
