"""The TCP connections of this process, as the system lists them."""

import os
import socket
from collections.abc import Iterator


def controls() -> Iterator[tuple[socket.socket, str]]:
    """Each connection, open until the next one, and its congestion control."""
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            copy = os.dup(int(descriptor))
        except OSError:
            continue  # the descriptor of the listing itself
        try:
            connection = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)  # no socket
            continue
        with connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and _is_connected(connection):
                yield (
                    connection,
                    connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode(),
                )


def _is_connected(connection: socket.socket) -> bool:
    try:
        return bool(connection.getpeername())
    except OSError:
        return False
