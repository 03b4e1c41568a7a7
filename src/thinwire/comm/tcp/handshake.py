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
import struct

from ..sockets import Stream, read_exactly, set_deadline
from ..tls.connections import Refused

SECRET_BYTES = NONCE_BYTES = PROOF_BYTES = 32
HELLO = struct.Struct(f"<q{NONCE_BYTES}s{PROOF_BYTES}s")
RANKS = struct.Struct("<qq")


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
    nonces = read_exactly(connection, NONCE_BYTES, deadline) + secrets.token_bytes(NONCE_BYTES)
    shown = proof(secret, b"connect", rank, peer, nonces)
    connection.sendall(HELLO.pack(rank, nonces[NONCE_BYTES:], shown))
    answer = read_exactly(connection, PROOF_BYTES, deadline)
    if not hmac.compare_digest(answer, proof(secret, b"accept", rank, peer, nonces)):
        raise ConnectionError("who listens there does not know the run's secret")


def greet(connection: Stream, rank: int, secret: bytes, deadline: float) -> tuple[int, bytes]:
    """The side that listens: ask a connector who it is, and demand a proof that it knows the secret.

    Args:
        connection: a connected socket, or a session on one.
        rank: this worker.
        secret: the run's.
        deadline: of `time.monotonic`.

    Returns:
        The connector's rank, and the answer that tells it that it is taken.

    Raises:
        Refused: the connector does not know the secret, or broke off.
        ConnectionResetError: it hung up before it said anything.
        OSError: it did not answer in time; with a session, its certificate was refused.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    set_deadline(connection, deadline)
    connection.sendall(nonce)
    set_deadline(connection, deadline)  # a session has shaken hands meanwhile
    # A caller that hangs up before its first byte is no stranger: a worker that ends does so too.
    first = connection.recv(1)
    if not first:
        raise ConnectionResetError("end of the connection")
    try:
        peer, other, shown = HELLO.unpack(first + read_exactly(connection, HELLO.size - 1, deadline))
    except ConnectionResetError:
        raise Refused("broke off its greeting") from None
    nonces = nonce + other
    if not hmac.compare_digest(shown, proof(secret, b"connect", peer, rank, nonces)):
        raise Refused("does not know the run's secret")
    return peer, proof(secret, b"accept", peer, rank, nonces)
