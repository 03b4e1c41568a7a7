"""Connects the sockets of a `SocketChannel`.

Every worker listens on a port of the chosen interface. Rank 0 makes a secret for the channel; it travels through the
communicator, with the addresses of all workers. Of two peers, the one with the higher rank connects, and both prove that
they know the secret (`handshake.py`). The listener reads all connections at once. It closes those that do not know the
secret, with a line in the log, and goes on. One deadline holds for all of them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable
from typing import Any

from .handle import CommunicationError
from .handshake import SECRET_BYTES, Greeting, introduce
from .sockets import SocketChannel

MAX_STRANGERS = 64  # that may be greeting at the same time; the oldest has to go
log = logging.getLogger("thinwire")


def open_sockets(
    rank: int,
    peers: Iterable[int],
    gather: Callable[[list[Any]], list[Any]],
    timeout_seconds: float,
    record: Callable[[int, int, int], None],
    max_bytes: int,
) -> SocketChannel:
    """Connect this worker with its peers. All workers call it.

    Args:
        rank, timeout_seconds, record, max_bytes: see `SocketChannel`.
        peers: the ranks to connect with; if a names b, b must name a.
        gather: returns what all workers passed in, in rank order.

    Raises:
        CommunicationError: a peer could not be reached, or did not connect within the time limit.
    """
    own_secret, higher = secrets.token_bytes(SECRET_BYTES), {peer for peer in peers if peer > rank}
    sockets: dict[int, socket.socket] = {}
    try:
        with _listen() as listener:
            host, port = listener.getsockname()[:2]
            addresses: list[tuple[str, int, str]] = gather([host, port, own_secret.hex() if rank == 0 else ""])
            secret = bytes.fromhex(addresses[0][2])
            deadline = time.monotonic() + timeout_seconds
            for peer in sorted(set(peers) - higher):
                host, port, _ = addresses[peer]
                sockets[peer] = _connect(rank, peer, host, port, secret, deadline)
            sockets |= _accept_peers(rank, listener, secret, higher, deadline)
        return SocketChannel(rank, sockets, timeout_seconds, record, max_bytes)
    except BaseException:
        for connection in sockets.values():
            connection.close()
        raise


def _connect(rank: int, peer: int, host: str, port: int, secret: bytes, deadline: float) -> socket.socket:
    try:
        connection = socket.create_connection((host, port), max(0.01, deadline - time.monotonic()))
        try:
            introduce(connection, rank, peer, secret, deadline)
        except BaseException:
            connection.close()
            raise
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
    greetings: dict[int, Greeting] = {}  # by descriptor, the oldest first
    poll = select.poll()
    listener.setblocking(False)
    poll.register(listener, select.POLLIN)

    def turn_away(descriptor: int, why: str) -> None:
        connection = greetings.pop(descriptor).connection
        poll.unregister(descriptor)
        log.warning("thinwire: rank %d closed a connection from %s, which %s", rank, name_of(connection), why)
        connection.close()

    try:
        while missing := expected - accepted.keys():
            left = deadline - time.monotonic()
            if left <= 0:
                raise CommunicationError(f"rank {rank}: ranks {sorted(missing)} did not connect within the time limit")
            for descriptor, _ in poll.poll(1000 * left):
                if descriptor == listener.fileno():
                    with contextlib.suppress(OSError):  # it hung up at once
                        greeting = Greeting(listener.accept()[0], rank, secret)
                        greetings[greeting.connection.fileno()] = greeting
                        poll.register(greeting.connection, select.POLLIN)
                    if len(greetings) > len(expected) + MAX_STRANGERS:
                        turn_away(next(iter(greetings)), "was silent for too long")
                    continue
                if descriptor not in greetings or (greeting := greetings[descriptor]).goes_on():
                    continue
                peer = greeting.proven()
                if peer in missing and peer not in accepted and greeting.accept():
                    accepted[peer] = greeting.connection
                    poll.unregister(descriptor)
                    del greetings[descriptor]
                else:
                    turn_away(descriptor, "does not know the run's secret")
        return accepted
    except BaseException:
        for connection in accepted.values():
            connection.close()
        raise
    finally:
        for greeting in greetings.values():
            greeting.connection.close()


def name_of(connection: socket.socket) -> str:
    with contextlib.suppress(OSError):
        host, port = connection.getpeername()[:2]
        return f"{host}:{port}"
    return "an address that is gone"


def _listen() -> socket.socket:
    family, host = own_address()
    return socket.create_server((host, 0), family=family, backlog=1024)


def own_address(interface: str | None = None, meeting: str | None = None) -> tuple[socket.AddressFamily, str]:
    """The address at which other workers reach this machine.

    It is that of the interface; else the one that reaches the host where workers meet; else, as in Gloo, the one that the
    machine's own name resolves to.

    Args:
        interface: its name; None takes GLOO_SOCKET_IFNAME.
        meeting: the host; None takes MASTER_ADDR.

    Raises:
        ValueError: the interface was named as an argument and has no address.
    """
    name = interface or os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if name and (found := _interface_address(name)):
        return found
    if interface:
        raise ValueError(
            f"interface {interface!r} does not exist here, or has no IPv4 address; `ip address` lists them"
        )
    master = meeting or os.environ.get("MASTER_ADDR") or socket.gethostname()
    with contextlib.suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return family, probe.getsockname()[0]
    return socket.AF_INET, "127.0.0.1"


def _interface_address(interface: str) -> tuple[socket.AddressFamily, str] | None:
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            SIOCGIFADDR = 0x8915
            answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.AF_INET, socket.inet_ntoa(answer[20:24])
    except (ImportError, OSError):
        return None  # not Linux, no such interface, or one without an IPv4 address
