"""How two workers prove to each other that they know the run's secret, before a channel takes any message.

The secret itself is not sent:

    listener  -> connector    nonce_l                          32 bytes
    connector -> listener     rank, nonce_c, proof "connect"   8 + 32 + 32 bytes
    listener  -> connector    proof "accept"                   32 bytes

A proof is HMAC-SHA-256, keyed by the secret, of its word, both ranks and both nonces. So it fits one connection only, and a
recorded one is of no use. Proofs are compared in constant time. With credentials, all of this happens inside TLS. Its
handshake succeeds for a connector whose certificate the listener then refuses; the last message tells it the truth.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from typing import Protocol

SECRET_BYTES = NONCE_BYTES = PROOF_BYTES = 32
HELLO = struct.Struct(f"<q{NONCE_BYTES}s{PROOF_BYTES}s")
RANKS = struct.Struct("<qq")
HUNG_UP = "has hung up"


class Stream(Protocol):
    """Bytes to and from another worker: a socket, or a TLS session on one."""

    def recv(self, size: int, /) -> bytes: ...

    def sendall(self, data: bytes | memoryview, /) -> None: ...

    def settimeout(self, seconds: float, /) -> None: ...


def proof(secret: bytes, word: bytes, connector: int, listener: int, nonces: bytes) -> bytes:
    """What only a worker that knows the secret can compute."""
    return hmac.digest(secret, word + RANKS.pack(connector, listener) + nonces, "sha256")


def introduce(connection: Stream, rank: int, peer: int, secret: bytes, deadline: float) -> None:
    """The side that connects: prove that this worker knows the secret, and demand the same of the listener.

    Args:
        connection: a connected socket, or a session on one.
        rank, peer: this worker and the listener.
        secret: the run's.
        deadline: of `time.monotonic`.

    Raises:
        OSError: the listener hung up, did not answer in time, or does not know the secret.
    """
    nonces = _read(connection, NONCE_BYTES, deadline) + secrets.token_bytes(NONCE_BYTES)
    shown = proof(secret, b"connect", rank, peer, nonces)
    connection.sendall(HELLO.pack(rank, nonces[NONCE_BYTES:], shown))
    answer = _read(connection, PROOF_BYTES, deadline)
    if not hmac.compare_digest(answer, proof(secret, b"accept", rank, peer, nonces)):
        raise ConnectionError("who listens there does not know the run's secret")


def _read(connection: Stream, size: int, deadline: float) -> bytes:
    said = b""
    while len(said) < size:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        part = connection.recv(size - len(said))
        if not part:
            raise ConnectionResetError("end of the connection")
        said += part
    return said


class Greeting:
    """The listener's side of one connection, which is read without waiting.

    Args:
        connection: a new connection; it becomes non-blocking.
        rank: this worker.
        secret: the run's.
        session: TLS on the connection; None for none.

    Raises:
        OSError: the connection has ended already.
    """

    def __init__(self, connection: socket.socket, rank: int, secret: bytes, session: Stream | None = None):
        self.connection, self._rank, self._secret = connection, rank, secret
        self._stream: Stream = session or connection
        self._nonce, self._said = secrets.token_bytes(NONCE_BYTES), bytearray()
        self.why = "does not know the run's secret"  # if it is turned away
        connection.setblocking(False)
        self._stream.settimeout(0.0)
        self._is_asked = False
        if session is None:
            self._ask()

    def goes_on(self) -> bool:
        """Read what has come; return whether more of the greeting may still come."""
        try:
            if not self._is_asked:
                self._ask()
            part = self._stream.recv(HELLO.size - len(self._said))
        except BlockingIOError:
            return True
        except OSError as error:
            if self._stream is not self.connection:
                self.why = f"is not of this run: {error}"
            elif not self._said:
                self.why = HUNG_UP
            return False
        self._said += part
        if not self._said:
            self.why = HUNG_UP
        return bool(part) and len(self._said) < HELLO.size

    def _ask(self) -> None:
        """Send the nonce, which a session does once its handshake is over."""
        self._stream.sendall(self._nonce)
        self._is_asked = True

    def proven(self) -> int | None:
        """The rank of a connector that has proved that it knows the secret; None for others."""
        if len(self._said) != HELLO.size:
            return None
        rank, nonce, shown = HELLO.unpack(self._said)
        expected = proof(self._secret, b"connect", rank, self._rank, self._nonce + nonce)
        return int(rank) if hmac.compare_digest(shown, expected) else None

    def accept(self) -> bool:
        """Tell a connector that has proved it that it is taken; return whether it is still there."""
        rank, nonce, _ = HELLO.unpack(self._said)
        try:
            self._stream.sendall(proof(self._secret, b"accept", rank, self._rank, self._nonce + nonce))
        except OSError:
            return False
        return True
