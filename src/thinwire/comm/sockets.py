"""A channel between processes: one TCP connection to each peer, and one thread that watches all of them.

`torch.distributed` has point-to-point messages, but Gloo's receive from any source cannot be cancelled, does not notice that a
peer has died, and closes all connections when it times out; NCCL's needs a known source. Sockets do what is needed: one
`poll` wakes at the first message, at the death of a peer, and at a byte in a pipe of our own. `connect.py` makes the
connections. Bytes that a TLS session has taken from its socket do not wake `poll`, so sessions are asked before.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from .. import debug
from . import check
from .channel import HEADER_BYTES, Channel, Message
from .handle import CommunicationError
from .handshake import Stream

if TYPE_CHECKING:
    from .tcp._engine import Session

Encrypted: TypeAlias = "tuple[socket.socket, Session | None]"
HEADER = struct.Struct("<qB")
SIGN_OF_LIFE = 0
SIGNS_PER_TIMEOUT = 4  # so that one late sign does no harm


class SocketChannel(Channel):
    """Messages over TCP. `connect.open_sockets` makes it.

    Args:
        rank: this worker.
        connections: a connected socket for each peer, and the TLS session on it, if it is encrypted.
        timeout_seconds: how long a peer may be silent.
        record: called with (messages, bytes_sent, bytes_received) for everything that is sent or received.
        max_bytes: of the payload of a message; a peer that announces more is treated as one that has failed.
    """

    def __init__(
        self,
        rank: int,
        connections: dict[int, Encrypted],
        timeout_seconds: float,
        record: Callable[[int, int, int], None],
        max_bytes: int,
    ):
        self._rank, self._timeout, self._record, self._max_bytes = rank, timeout_seconds, record, max_bytes
        self._sockets = {peer: connection for peer, (connection, _) in connections.items()}
        self._sessions = {peer: session for peer, (_, session) in connections.items() if session}
        self._streams: dict[int, Stream] = {**self._sockets, **self._sessions}
        self._ready: deque[int] = deque()
        self._broken: set[int] = set()  # a message was cut short; later bytes would be read as its rest
        self._silent_seconds = dict.fromkeys(connections, 0.0)
        self._next_sign = time.monotonic() + timeout_seconds / SIGNS_PER_TIMEOUT
        self._wakened, self._waker = socket.socketpair()
        for connection in (self._wakened, self._waker):
            connection.setblocking(False)
        for peer, connection in self._sockets.items():
            self._streams[peer].settimeout(timeout_seconds)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, peer: int, kind: int, payload: Tensor | None = None) -> None:
        body = memoryview(b"") if payload is None else _memory(payload)
        check.message(self._rank, peer, len(body), self._max_bytes)
        try:
            if peer in self._broken:
                raise BrokenPipeError("an earlier message was cut short")
            self._streams[peer].sendall(HEADER.pack(len(body), kind))
            self._streams[peer].sendall(body)
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
        """The next message from a source that is ready; None if only signs of life have come."""
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
        """Wait until something is readable, a sign is due or the deadline has come; return whether `wake` was called."""
        before = time.monotonic()
        until = max(before, self._next_sign if deadline is None else min(self._next_sign, deadline))
        taken = {peer for peer in sources & self._sessions.keys() if self._sessions[peer].is_readable}
        if taken:
            until = before
        poll, peers = select.poll(), {self._sockets[peer].fileno(): peer for peer in sources}
        for descriptor in (*peers, self._wakened.fileno()):
            poll.register(descriptor, select.POLLIN)
        readable = [descriptor for descriptor, _ in poll.poll(1000 * (until - before))]
        # All of them are read before the next poll, so that no peer is starved.
        self._ready = deque(sorted(taken | {peers[descriptor] for descriptor in readable if descriptor in peers}))
        # At most the planned time: if this process was stopped meanwhile, the others may have sent all along.
        self._notice_silence(sources, min(time.monotonic(), until) - before)
        wakened = self._wakened.fileno() in readable
        if wakened:
            self._wakened.recv(4096)
        return wakened

    def _notice_silence(self, sources: set[int], seconds: float) -> None:
        # Only the time spent listening here counts as silence of a peer.
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
        for descriptor, _ in poll.poll(0):  # if there is no room, the peer has enough to read
            with contextlib.suppress(CommunicationError):  # `receive` raises the error after the peer's last message
                self.send(peers[descriptor], SIGN_OF_LIFE)

    def _read(self, peer: int) -> Message:
        """The next message of a peer, which must be whole within the time limit."""
        stream, deadline = self._streams[peer], time.monotonic() + self._timeout
        try:
            num_bytes, kind = HEADER.unpack(_read_exactly(stream, bytearray(HEADER_BYTES), deadline))
            if not 0 <= num_bytes <= (0 if kind == SIGN_OF_LIFE else self._max_bytes):
                raise CommunicationError(
                    f"rank {peer} announced a message of kind {kind} and {num_bytes} bytes, expected at most "
                    f"{self._max_bytes}; do all workers run the same version and configuration?"
                )
            payload = debug.empty(num_bytes, dtype=torch.uint8, device="cpu")
            _read_exactly(stream, _memory(payload), deadline)
        except OSError as error:
            raise self._failed("receive from", peer, error) from error
        finally:
            stream.settimeout(self._timeout)
        self._record(0, 0, HEADER_BYTES + num_bytes)
        return Message(peer, kind, payload)

    def _failed(self, what: str, peer: int, error: OSError) -> CommunicationError:
        if isinstance(error, TimeoutError):
            return CommunicationError(f"{what} rank {peer} took more than {self._timeout:g} seconds")
        return CommunicationError(f"rank {peer} has hung up or died ({error.strerror or error})")


def _read_exactly(stream: Stream, buffer: bytearray | memoryview, deadline: float) -> bytearray | memoryview:
    """Fill `buffer`, and return it; a peer that sends a byte now and then does not prolong the wait."""
    rest = memoryview(buffer)
    while rest:
        stream.settimeout(max(0.001, deadline - time.monotonic()))
        count = stream.recv_into(rest)
        if count == 0:
            raise ConnectionResetError("end of the connection")
        rest = rest[count:]
    return buffer


def _discard(connection: socket.socket) -> bool:
    """Read and drop some bytes; return False at the end of the connection."""
    try:
        return bool(connection.recv(1 << 16))
    except OSError:
        return False


def _memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]  # NumPy's type says so from Python 3.12 on
