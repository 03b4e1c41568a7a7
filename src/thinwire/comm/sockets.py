"""A channel between processes: one TCP connection to each peer, and one thread that watches all of them.

`torch.distributed` has point-to-point messages, but Gloo's receive from any source cannot be cancelled, does not notice that a
peer has died, and closes all connections when it times out; NCCL's needs a known source. Sockets do what is needed: one
`poll` wakes at the first message, at the death of a peer, and at a byte in a pipe of our own.

Connecting. Every worker listens on a port of its own. Its address and a random secret travel through the communicator. Of
two peers the one of higher rank connects, and first sends the listener's secret and its own rank. The listener reads all
connections side by side, closes those that do not send the secret, and gives up at one deadline for all.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .. import debug
from .base import CommunicationError
from .channel import HEADER_BYTES, Channel, Message

HEADER = struct.Struct("<qB")
SECRET_BYTES = 16
HELLO = struct.Struct(f"<{SECRET_BYTES}sq")
SIGN_OF_LIFE = 0
SIGNS_PER_TIMEOUT = 4  # so that one that is late does no harm


class SocketChannel(Channel):
    """Messages over TCP. Made by `open_sockets`.

    Args:
        rank: this worker.
        sockets: a connected socket for each peer.
        timeout_seconds: how long a peer may be silent.
        record: told (messages, bytes_sent, bytes_received) of everything that crosses the wire.
    """

    def __init__(
        self,
        rank: int,
        sockets: dict[int, socket.socket],
        timeout_seconds: float,
        record: Callable[[int, int, int], None],
    ):
        self._rank, self._sockets, self._timeout, self._record = rank, sockets, timeout_seconds, record
        self._ready: deque[int] = deque()
        self._broken: set[int] = set()  # a message was cut short, and what followed would be taken for its rest
        self._silent_seconds = dict.fromkeys(sockets, 0.0)
        self._next_sign = time.monotonic() + timeout_seconds / SIGNS_PER_TIMEOUT
        self._wakened, self._waker = socket.socketpair()
        for connection in (self._wakened, self._waker):
            connection.setblocking(False)
        for connection in sockets.values():
            connection.settimeout(timeout_seconds)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, peer: int, kind: int, payload: Tensor | None = None) -> None:
        body = memoryview(b"") if payload is None else _memory(payload)
        try:
            if peer in self._broken:
                raise BrokenPipeError("an earlier message was cut short")
            self._sockets[peer].sendall(HEADER.pack(len(body), kind))
            self._sockets[peer].sendall(body)
        except OSError as error:
            self._broken.add(peer)
            raise self._failed("send to", peer, error) from error
        self._record(1, HEADER_BYTES + len(body), 0)

    def receive(self, sources: Iterable[int], timeout_seconds: float | None = None) -> Message | None:
        sources = set(sources)
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            self._give_sign(sources)
            if not any(peer in sources for peer in self._ready):
                if self._poll(sources, deadline):
                    return None
                if not self._ready and deadline is not None and time.monotonic() >= deadline:
                    return None
            message = self._next(sources)
            if message is not None:
                return message

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # a full pipe wakes as well
            self._waker.send(b"\0")

    def linger(self, seconds: float) -> None:
        deadline, open_ends = time.monotonic() + seconds, {c.fileno(): c for c in self._sockets.values()}
        poll = select.poll()
        for descriptor, connection in open_ends.items():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
            poll.register(descriptor, select.POLLIN)
        while open_ends and (left := deadline - time.monotonic()) > 0:
            for descriptor, _ in poll.poll(1000 * left):
                if not _discard(open_ends[descriptor]):
                    poll.unregister(descriptor)
                    del open_ends[descriptor]

    def close(self) -> None:
        for connection in (*self._sockets.values(), self._wakened, self._waker):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # tells the peer even while another thread is in poll
            connection.close()

    def _next(self, sources: set[int]) -> Message | None:
        """The next message of a source that is ready; None if it was a sign of life, or none is ready."""
        while self._ready:
            peer = self._ready.popleft()
            if peer not in sources:
                continue
            message = self._read(peer)
            self._silent_seconds[peer] = 0.0
            if message.kind != SIGN_OF_LIFE:
                return message
        return None

    def _poll(self, sources: set[int], deadline: float | None) -> bool:
        """Wait until something is readable, a sign is due or the deadline is there; whether `wake` was called."""
        before = time.monotonic()
        until = max(before, self._next_sign if deadline is None else min(self._next_sign, deadline))
        poll, peers = select.poll(), {self._sockets[peer].fileno(): peer for peer in sources}
        for descriptor in (*peers, self._wakened.fileno()):
            poll.register(descriptor, select.POLLIN)
        readable = [descriptor for descriptor, _ in poll.poll(1000 * (until - before))]
        # All of them are read before the next poll, so that nobody is forgotten.
        self._ready = deque(sorted(peers[descriptor] for descriptor in readable if descriptor in peers))
        # Not more than was asked for: who was stopped meanwhile cannot say how long the others were silent.
        self._notice_silence(sources, min(time.monotonic(), until) - before)
        wakened = self._wakened.fileno() in readable
        if wakened:
            self._wakened.recv(4096)
        return wakened

    def _notice_silence(self, sources: set[int], seconds: float) -> None:
        # Only time spent here counts: who does not listen cannot call others silent.
        for peer in sources.difference(self._ready):
            self._silent_seconds[peer] += seconds
            if self._silent_seconds[peer] > self._timeout:
                raise CommunicationError(f"nothing came from rank {peer} in {self._timeout:g} seconds")

    def _give_sign(self, sources: set[int]) -> None:
        if time.monotonic() < self._next_sign:
            return
        self._next_sign = time.monotonic() + self._timeout / SIGNS_PER_TIMEOUT
        poll, peers = select.poll(), {self._sockets[peer].fileno(): peer for peer in sources}
        for descriptor in peers:
            poll.register(descriptor, select.POLLOUT)
        for descriptor, _ in poll.poll(0):  # where there is no room the peer has enough to read
            with contextlib.suppress(CommunicationError):  # reading will tell, after the peer's last words
                self.send(peers[descriptor], SIGN_OF_LIFE)

    def _read(self, peer: int) -> Message:
        try:
            num_bytes, kind = HEADER.unpack(_read_exactly(self._sockets[peer], bytearray(HEADER_BYTES)))
            payload = debug.empty(num_bytes, dtype=torch.uint8)
            _read_exactly(self._sockets[peer], _memory(payload))
        except OSError as error:
            raise self._failed("receive from", peer, error) from error
        self._record(0, 0, HEADER_BYTES + num_bytes)
        return Message(peer, kind, payload)

    def _failed(self, what: str, peer: int, error: OSError) -> CommunicationError:
        if isinstance(error, TimeoutError):
            return CommunicationError(f"{what} rank {peer} took more than {self._timeout:g} seconds")
        return CommunicationError(f"rank {peer} has hung up or died ({error.strerror or error})")


def open_sockets(
    rank: int,
    peers: Iterable[int],
    gather: Callable[[list[Any]], list[Any]],
    timeout_seconds: float,
    record: Callable[[int, int, int], None],
) -> SocketChannel:
    """Connects this worker with its peers. All workers call it.

    Args:
        rank, timeout_seconds, record: see `SocketChannel`.
        peers: whom to connect with; if a names b, b must name a.
        gather: gives every worker what all passed in, in rank order.

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
    """Accept the expected peers, all connections side by side, so that nobody who is slow or silent delays the others.

    Raises:
        CommunicationError: at the deadline, where peers are missing.
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
    """Read on without waiting; whether the greeting may still become complete."""
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
    """The address at which others reach this machine: that of the interface in GLOO_SOCKET_IFNAME, else the one from which
    MASTER_ADDR is reached, else what the machine's own name stands for, as for Gloo."""
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


def _read_exactly(connection: socket.socket, buffer: bytearray | memoryview) -> bytearray | memoryview:
    """Fills `buffer`, and returns it."""
    rest = memoryview(buffer)
    while rest:
        count = connection.recv_into(rest)
        if count == 0:
            raise ConnectionResetError("end of the connection")
        rest = rest[count:]
    return buffer


def _discard(connection: socket.socket) -> bool:
    """Whether there was something to read, rather than the end."""
    try:
        return bool(connection.recv(1 << 16))
    except OSError:
        return False


def _memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]  # NumPy's type says so from Python 3.12 on
