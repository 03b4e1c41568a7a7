"""Connects the sockets of a `SocketChannel`.

Every worker listens on a port of the chosen interface. Rank 0 makes a secret for the channel; it travels through the
communicator, with the addresses of all workers. Of two peers, the one with the higher rank connects, and both prove that
they know the secret (`handshake.py`), inside TLS where there are credentials. The listener reads all connections at once. It
closes those that do not know the secret, with a line in the log, and goes on. One deadline holds for all of them.
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
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .handle import CommunicationError
from .handshake import SECRET_BYTES, Greeting, introduce
from .sockets import Encrypted, SocketChannel

if TYPE_CHECKING:
    from .tcp._engine import Session
    from .tcp.identity import Identity

MAX_GREETINGS = 64  # that are not finished, at a time; the oldest connection is closed
log = logging.getLogger("thinwire")


def open_sockets(
    rank: int,
    peers: Iterable[int],
    gather: Callable[[list[Any]], list[Any]],
    timeout_seconds: float,
    record: Callable[[int, int, int], None],
    max_bytes: int,
    identity: Identity | None = None,
) -> SocketChannel:
    """Connect this worker with its peers. All workers call it.

    Args:
        rank, timeout_seconds, record, max_bytes: see `SocketChannel`.
        peers: the ranks to connect with; if a names b, b must name a.
        gather: returns what all workers passed in, in rank order.
        identity: that of this worker; None encrypts nothing.

    Raises:
        CommunicationError: a peer could not be reached, or did not connect within the time limit.
    """
    own_secret, higher = secrets.token_bytes(SECRET_BYTES), {peer for peer in peers if peer > rank}
    made: dict[int, Encrypted] = {}
    try:
        with _listen() as listener:
            own = [*listener.getsockname()[:2], identity.name if identity else ""]
            told: list[tuple[str, int, str, str]] = gather([*own, own_secret.hex() if rank == 0 else ""])
            names, secret = [name for _, _, name, _ in told], bytes.fromhex(told[0][3])
            deadline = time.monotonic() + timeout_seconds
            for peer in sorted(set(peers) - higher):
                made[peer] = _connect(rank, peer, told[peer], secret, deadline, identity)
            made |= _accept_peers(rank, listener, secret, higher, deadline, identity, names)
        return SocketChannel(rank, made, timeout_seconds, record, max_bytes)
    except BaseException:
        for connection, _ in made.values():
            connection.close()
        raise


def _connect(
    rank: int,
    peer: int,
    told: tuple[str, int, str, str],
    secret: bytes,
    deadline: float,
    identity: Identity | None,
) -> Encrypted:
    host, port, name, _ = told
    try:
        connection = socket.create_connection((host, port), max(0.01, deadline - time.monotonic()))
        try:
            session = identity.session(connection, accepts=False) if identity else None
            introduce(session or connection, rank, peer, secret, deadline)
            if session and session.peer_name != name:
                raise ConnectionError(f"it has the certificate of {session.peer_name!r}, and not of {name!r}")
        except BaseException:
            connection.close()
            raise
        return connection, session
    except OSError as error:
        raise CommunicationError(
            f"rank {rank}: cannot connect to rank {peer} at {host}:{port} ({error}). Name the network interface "
            "that reaches the other workers in GLOO_SOCKET_IFNAME."
        ) from error


def _accept_peers(
    rank: int,
    listener: socket.socket,
    secret: bytes,
    expected: set[int],
    deadline: float,
    identity: Identity | None,
    names: Sequence[str],
) -> dict[int, Encrypted]:
    """Accept the expected peers, all connections at once, so that a slow or silent one delays no other.

    Raises:
        CommunicationError: peers are missing at the deadline.
    """
    accepted: dict[int, Encrypted] = {}
    greetings: dict[int, tuple[Greeting, Session | None]] = {}  # by descriptor, the oldest first
    poll = select.poll()
    listener.setblocking(False)
    poll.register(listener, select.POLLIN)

    def greet() -> None:
        connection = listener.accept()[0]
        session = identity.session(connection, accepts=True) if identity else None
        greetings[connection.fileno()] = Greeting(connection, rank, secret, session), session
        poll.register(connection, select.POLLIN)

    def turn_away(descriptor: int, why: str) -> None:
        connection = greetings.pop(descriptor)[0].connection
        poll.unregister(descriptor)
        log.warning("rank %d closed a connection from %s, which %s", rank, name_of(connection), why)
        connection.close()

    try:
        while missing := expected - accepted.keys():
            left = deadline - time.monotonic()
            if left <= 0:
                raise CommunicationError(f"rank {rank}: ranks {sorted(missing)} did not connect within the time limit")
            for descriptor, _ in poll.poll(1000 * left):
                if descriptor == listener.fileno():
                    with contextlib.suppress(OSError):  # it hung up at once
                        greet()
                    if len(greetings) > len(expected) + MAX_GREETINGS:
                        turn_away(next(iter(greetings)), "was silent for too long")
                    continue
                if descriptor not in greetings or greetings[descriptor][0].goes_on():
                    continue
                greeting, session = greetings[descriptor]
                peer = greeting.proven()
                if peer is None or peer not in missing or peer in accepted:
                    turn_away(descriptor, greeting.why)
                elif session and session.peer_name != names[peer]:
                    turn_away(descriptor, f"has the certificate of {session.peer_name!r}, and not that of rank {peer}")
                elif greeting.accept():
                    accepted[peer] = greeting.connection, session
                    poll.unregister(descriptor)
                    del greetings[descriptor]
                else:
                    turn_away(descriptor, "has hung up")
        return accepted
    except BaseException:
        for connection, _ in accepted.values():
            connection.close()
        raise
    finally:
        for greeting, _ in greetings.values():
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
