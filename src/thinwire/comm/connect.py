"""Connects the sockets of a `SocketChannel`.

Every worker listens on a port. Its address and a random secret travel through the communicator. Of two peers, the one with
the higher rank connects; it first sends the listener's secret and its own rank. The listener reads all connections at once
and closes those that do not send the secret. One deadline holds for all of them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable
from typing import Any

from .handle import CommunicationError
from .sockets import SocketChannel

SECRET_BYTES = 16
HELLO = struct.Struct(f"<{SECRET_BYTES}sq")


def open_sockets(
    rank: int,
    peers: Iterable[int],
    gather: Callable[[list[Any]], list[Any]],
    timeout_seconds: float,
    record: Callable[[int, int, int], None],
) -> SocketChannel:
    """Connect this worker with its peers. All workers call it.

    Args:
        rank, timeout_seconds, record: see `SocketChannel`.
        peers: the ranks to connect with; if a names b, b must name a.
        gather: returns what all workers passed in, in rank order.

    Raises:
        CommunicationError: a peer could not be reached, or did not connect within the time limit.
    """
    secret, higher = secrets.token_bytes(SECRET_BYTES), {peer for peer in peers if peer > rank}
    sockets: dict[int, socket.socket] = {}
    try:
        with _listen() as listener:
            host, port = listener.getsockname()[:2]
            addresses: list[tuple[str, int, str]] = gather([host, port, secret.hex()])
            deadline = time.monotonic() + timeout_seconds
            for peer in sorted(set(peers) - higher):
                sockets[peer] = _connect(rank, peer, *addresses[peer], max(0.01, deadline - time.monotonic()))
            sockets |= _accept_peers(rank, listener, secret, higher, deadline)
        return SocketChannel(rank, sockets, timeout_seconds, record)
    except BaseException:
        for connection in sockets.values():
            connection.close()
        raise


def _connect(rank: int, peer: int, host: str, port: int, secret: str, timeout_seconds: float) -> socket.socket:
    try:
        connection = socket.create_connection((host, port), timeout_seconds)
        connection.sendall(HELLO.pack(bytes.fromhex(secret), rank))
        return connection
    except OSError as error:
        raise CommunicationError(
            f"rank {rank}: cannot connect to rank {peer} at {host}:{port} ({error}). Name the network interface "
            "that reaches the other workers in GLOO_SOCKET_IFNAME."
        ) from error


def _accept_peers(
    rank: int, listener: socket.socket, secret: bytes, expected: set[int], deadline: float
) -> dict[int, socket.socket]:
    """Accept the expected peers, all connections at once, so that a slow or silent one delays no other.

    Raises:
        CommunicationError: peers are missing at the deadline.
    """
    accepted: dict[int, socket.socket] = {}
    greeting: dict[int, tuple[socket.socket, bytearray]] = {}  # descriptor -> connection and what it has said so far
    poll = select.poll()
    listener.setblocking(False)
    poll.register(listener, select.POLLIN)
    try:
        while missing := expected - accepted.keys():
            left = deadline - time.monotonic()
            if left <= 0:
                raise CommunicationError(f"rank {rank}: ranks {sorted(missing)} did not connect within the time limit")
            for descriptor, _ in poll.poll(1000 * left):
                if descriptor == listener.fileno():
                    with contextlib.suppress(OSError):  # it hung up at once
                        connection, _ = listener.accept()
                        connection.setblocking(False)
                        greeting[connection.fileno()] = connection, bytearray()
                        poll.register(connection, select.POLLIN)
                    continue
                connection, said = greeting[descriptor]
                if _is_greeting(connection, said):
                    continue
                poll.unregister(descriptor)
                del greeting[descriptor]
                peer = _peer_of(said, secret)
                if peer in missing and peer not in accepted:
                    accepted[peer] = connection
                else:
                    connection.close()
        return accepted
    except BaseException:
        for connection in accepted.values():
            connection.close()
        raise
    finally:
        for connection, _ in greeting.values():
            connection.close()


def _is_greeting(connection: socket.socket, said: bytearray) -> bool:
    """Read without waiting; return whether more of the greeting may still come."""
    try:
        part = connection.recv(HELLO.size - len(said))
    except BlockingIOError:
        return True
    except OSError:
        return False
    said += part
    return bool(part) and len(said) < HELLO.size


def _peer_of(said: bytes | bytearray, secret: bytes) -> int | None:
    """The rank that a greeting names, or None if it does not hold the secret."""
    if len(said) != HELLO.size:
        return None
    shown, rank = HELLO.unpack(said)
    return int(rank) if secrets.compare_digest(shown, secret) else None


def _listen() -> socket.socket:
    family, host = own_address()
    return socket.create_server((host, 0), family=family, backlog=1024)


def own_address() -> tuple[socket.AddressFamily, str]:
    """The address at which other workers reach this machine.

    It is that of the interface in GLOO_SOCKET_IFNAME; else the one that reaches MASTER_ADDR; else, as in Gloo, the one that
    the machine's own name resolves to.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface and (found := _interface_address(interface)):
        return socket.AF_INET, found
    master = os.environ.get("MASTER_ADDR") or socket.gethostname()
    with contextlib.suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return family, probe.getsockname()[0]
    return socket.AF_INET, "127.0.0.1"


def _interface_address(interface: str) -> str | None:
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            SIOCGIFADDR = 0x8915
            answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    except (ImportError, OSError):
        return None  # not Linux, or no such interface
