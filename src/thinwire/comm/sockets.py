"""What all connections of ours have in common, whatever they carry."""

from __future__ import annotations

import contextlib
import errno
import math
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol, TypeVar

FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # this machine has no place for another connection
LOOK_SECONDS = 0.5  # between two looks of a listener at what may have changed; some systems wake no thread that accepts
SMALL_PACKET, HEADERS = 1280, 60  # bytes; all paths that carry IPv6 carry such packets
ADDRESS_SECONDS = 5.0  # before the next one of several addresses of a host is tried
SLOW_SECONDS = 0.06  # a round trip on which repairing a lost packet takes long, as in the engine
STEADY = b"bbr"  # a congestion control that does not slow down at each lost packet
Caller = TypeVar("Caller")
Result = TypeVar("Result")


class Stream(Protocol):
    """Bytes to and from another worker: a socket, or a TLS session on one."""

    def recv(self, size: int, /) -> bytes: ...

    def sendall(self, data: bytes | memoryview, /) -> None: ...

    def settimeout(self, seconds: float, /) -> None: ...


def set_deadline(connection: Stream, deadline: float, silent_seconds: float = math.inf) -> None:
    """Let what comes next on a connection end at `deadline`, of `time.monotonic`, or after so many seconds if that is less."""
    # A timeout of 0 would make the socket non-blocking.
    connection.settimeout(max(0.001, min(silent_seconds, deadline - time.monotonic())))


def read_exactly(
    connection: Stream, size: int, deadline: float | None = None, silent_seconds: float = math.inf
) -> bytes:
    """The next `size` bytes.

    Args:
        connection: to read from.
        size: in bytes.
        deadline: of `time.monotonic`; None for the connection's own time limit, which holds for each part that comes.
        silent_seconds: with a deadline, how long to wait for each part.

    Raises:
        ConnectionResetError: the connection ended before.
        OSError: it failed, or the bytes did not come in time.
    """
    read = bytearray()
    while len(read) < size:
        if deadline is not None:
            set_deadline(connection, deadline, silent_seconds)
        part = connection.recv(size - len(read))
        if not part:
            raise ConnectionResetError("end of the connection")
        read += part
    return bytes(read)


def dial_small(host: str, port: int, seconds: float) -> socket.socket:
    """Connect as `socket.create_connection`, with packets of at most `SMALL_PACKET` bytes in both directions.

    On some paths, such as through a badly configured tunnel or firewall, larger ones are lost, and no router says so.

    Args:
        host, port: of the listener. A name may stand for several addresses, and some may be dead.
        seconds: for all addresses together. A dead one takes its share, and `ADDRESS_SECONDS` at most.

    Raises:
        OSError: nobody answers.
    """
    failed = OSError(f"{host} has no address")
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for family, kind, protocol, _, address in found:
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(seconds if len(found) == 1 else min(seconds / len(found), ADDRESS_SECONDS))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SMALL_PACKET - HEADERS)
            connection.connect(address)
            return connection
        except OSError as error:
            connection.close()
            failed = error
    raise failed


def keep_trying(
    act: Callable[[float], Result], seconds: float, pause: float, *, final: tuple[type[OSError], ...] = ()
) -> Result:
    """What `act` returns, which is called again while it raises an OSError: who listens may not have been started yet.

    Args:
        act: gets the seconds that are left, 0.1 or more.
        seconds: after which no other try begins.
        pause: seconds between two tries.
        final: errors that another try would not mend.

    Raises:
        OSError: that of the last try.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return act(max(0.1, deadline - time.monotonic()))
        except final:
            raise
        except OSError:
            if time.monotonic() + pause > deadline:
                raise
        time.sleep(pause)


def callers(
    listener: socket.socket, closed: threading.Event, warn: Callable[[str | None], None]
) -> Iterator[tuple[socket.socket, tuple[str, int]] | None]:
    """All connections that come to a listener, and their addresses; None now and then.

    Args:
        listener: where callers come.
        closed: ends this.
        warn: called with the reason if this machine cannot take a connection.
    """
    while not closed.is_set():
        try:
            listener.settimeout(LOOK_SECONDS)
            connection, (host, port, *_) = listener.accept()
            # A socket for both families shows IPv4 addresses with this prefix.
            yield connection, (host.removeprefix("::ffff:"), port)
        except OSError as error:
            if error.errno in FULL:
                warn(error.strerror)
                closed.wait(1.0)  # it would be tried again at once, and again
            yield None


def max_descriptors() -> int:
    """How many descriptors this process may have at a time."""
    if sys.platform == "win32":
        return sys.maxsize
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft  # which is -1 on Linux


def be_patient(connection: socket.socket, silent_seconds: int) -> None:
    """Send small messages at once, and give up a peer that acknowledges nothing for so long.

    Its probes also keep the entries of NATs on the way.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Ten idle seconds, and then probes every two, add up to `silent_seconds`.
    probes = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": max(3, (silent_seconds - 10) // 2)}
    for name, value in {**probes, "TCP_USER_TIMEOUT": 1000 * silent_seconds}.items():
        if option := getattr(socket, name, None):  # macOS lacks some
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def choose_congestion(connection: socket.socket) -> None:
    """Choose `STEADY` for a connection that carries much and whose round trip is long."""
    # What a system does not have or does not allow, it does without.
    with contextlib.suppress(AttributeError, OSError, struct.error):
        (microseconds,) = tcp_info(connection, 68)  # tcpi_rtt
        if microseconds > 1e6 * SLOW_SECONDS:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, STEADY)


def tcp_info(connection: socket.socket, *offsets: int) -> tuple[int, ...]:
    """Numbers that Linux keeps of a connection, each at an offset in `struct tcp_info` of linux/tcp.h.

    Raises:
        OSError: the connection has none.
        struct.error: this kernel is older than the number.
    """
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return tuple(struct.unpack_from("=I", info, offset)[0] for offset in offsets)


def end(connection: socket.socket) -> None:
    """End a connection that another thread may be waiting for."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def talk_beside(
    talk: Callable[[], None],
    name: str,
    connection: socket.socket,
    host: str,
    greeting: dict[socket.socket, str],
    most: int,
    lock: threading.Lock,
) -> str | None:
    """Talk with a caller in a thread of its own. With more than `most` that are being greeted, one of them has to go.

    Args:
        talk: what the thread runs; it takes the caller out of `greeting`.
        name: of the thread.
        connection: of the caller.
        host: that it comes from.
        greeting: all who are being greeted, the oldest first.
        most: of them.
        lock: of `greeting`.

    Returns:
        Why no thread could be started, in which case the connection is closed; else None.
    """
    with lock:
        greeting[connection] = host
        if len(greeting) > most:
            oldest = oldest_of_busiest(greeting)
            del greeting[oldest]
            end(oldest)
    try:
        threading.Thread(target=talk, name=name, daemon=True).start()
    except RuntimeError as error:  # this machine has no place for another thread now
        with lock:
            greeting.pop(connection, None)
        connection.close()
        return str(error)
    return None


def oldest_of_busiest(callers: Mapping[Caller, str]) -> Caller:
    """Which of too many callers has to go: the oldest one of the address that has most.

    Args:
        callers: and the addresses that they come from, the oldest first.

    Example:
        >>> oldest_of_busiest({1: "10.0.0.1", 2: "10.0.0.2", 3: "10.0.0.2"})
        2
    """
    busiest = Counter(callers.values()).most_common(1)[0][0]
    return next(caller for caller, host in callers.items() if host == busiest)
