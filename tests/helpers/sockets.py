"""The congestion control of this process's TCP connections, as the system has it."""

import socket
from collections.abc import Iterator

from helpers.traffic import connections


def controls() -> Iterator[tuple[socket.socket, str]]:
    """Each connection, open until the next one, and its congestion control."""
    for connection in connections():
        yield connection, connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
