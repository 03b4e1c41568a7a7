"""Questions and answers, for stores, the Lighthouse, `thinwire keys` and the state that joining workers get.

With credentials they go over TLS: a listener gives a caller without a certificate of the run a handshake, and nothing more.
Without, they are plain, and everybody is answered: so workers that join an elastic run get its state. Each connection has a
thread of its own, because Python's `ssl` cannot use one from two threads at once. A client learns only with the first byte
that it was accepted: in TLS 1.3 its handshake ends before the listener has seen its certificate.

    listener  -> client     ACCEPTED
    client    -> listener   a frame: the question
    listener  -> client     a frame: the answer; and so on

A frame is its length (4 bytes, at most `MAX_FRAME_BYTES`), then fields: the length of each (4 bytes), and its bytes. Both
sides count whole frames, once they are sent or read.

A worker with credentials may lie too. So a question is short where no long one is needed, answers that nobody reads take
`MAX_UNREAD_BYTES` at most, all together, and a caller that does not read its answer in `UNREAD_SECONDS` is sent away.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from ...messages import log
from ..addresses import address_text, listening_address, own_addresses_of
from ..notice import Flood
from ..sockets import (
    LOOK_SECONDS,
    be_patient,
    callers,
    choose_congestion,
    dial_small,
    end,
    keep_trying,
    max_descriptors,
    oldest_of_busiest,
    read_exactly,
    set_deadline,
    talk_beside,
)
from . import relay
from .credentials import WRONG, Credentials, name_in

MAX_FRAME_BYTES = 1 << 22
MAX_QUESTION_BYTES = 1 << 16
"""Of a question, but to a store."""
MAX_FIELDS = 1 << 14
MAX_UNREAD_BYTES, UNREAD_SECONDS = 1 << 28, 300
MAX_HANDSHAKES = 64
"""Handshakes at the same time; with more, the oldest one of the address that has most is ended."""
MAX_CONNECTIONS, DESCRIPTORS = 4096, 2
"""Of one listener, and how many descriptors each takes."""
HANDSHAKE_SECONDS = 10.0
PROBE_SECONDS = 2.0  # to find out whether a listener has credentials
RETRY_SECONDS = 0.05  # between two tries to reach a listener that may not have been started yet
SILENT_SECONDS = 60  # after which the kernel gives up a peer that does not acknowledge
ACCEPTED = b"\x01"
LENGTH = struct.Struct("!I")
Answer = Callable[[list[bytes]], list[bytes]]
Record = Callable[[int, int], None]
"""Is called with the bytes of a frame that was sent, and of one that was read, in any thread."""


class Refused(ConnectionError):
    """The other side is not of the run, or says that this worker is not."""


# ---- frames ----


def send_frame(connection: socket.socket, *fields: bytes) -> None:
    """Send some fields as one frame."""
    body = b"".join(LENGTH.pack(len(field)) + field for field in fields)
    connection.sendall(LENGTH.pack(len(body)) + body)


def frame_bytes(fields: Sequence[bytes]) -> int:
    """The number of bytes of a frame."""
    return LENGTH.size + sum(LENGTH.size + len(field) for field in fields)


def no_record(sent: int, received: int) -> None:
    """Counts nothing."""


def read_frame(
    connection: socket.socket,
    max_bytes: int = MAX_FRAME_BYTES,
    deadline: float | None = None,
    silent_seconds: float = math.inf,
) -> list[bytes]:
    """The fields of the next frame. The deadline and the seconds are those of `read_exactly`.

    Raises:
        OSError: the connection has ended, or what came is no frame.
    """
    (size,) = LENGTH.unpack(read_exactly(connection, LENGTH.size, deadline, silent_seconds))
    if size > max_bytes:
        raise Refused(f"a frame of {size} bytes was announced, expected at most {max_bytes}")
    return list(_fields(read_exactly(connection, size, deadline, silent_seconds)))


def _fields(body: bytes) -> Iterator[bytes]:
    at = 0
    for _ in range(MAX_FIELDS):
        if at == len(body):
            return
        begin = at + LENGTH.size
        at = begin + (LENGTH.unpack_from(body, at)[0] if begin <= len(body) else MAX_FRAME_BYTES)
        if at > len(body):
            raise Refused("a frame ends within a field")
        yield body[begin:at]
    if at < len(body):
        raise Refused(f"a frame has more than {MAX_FIELDS} fields")


# ---- the side that listens ----


class Listener:
    """Answers the workers of a run at one address. New keys, and certificates that are revoked, end its connections.

    Args:
        host: address of this machine; where it is translated on the way, so that this machine does not have it, the listener
            takes all addresses. Or a name at a relay, `relay.host_at`, where it takes connections instead.
        port: TCP port; 0 takes a free one.
        credentials: of this worker; None answers everybody, without TLS.
        answer: the answer to a question; it is called in many threads.
        asks_all: whether it also answers callers without a certificate, as only `thinwire keys token` does.
        max_bytes: of a question.
        record: counts questions and answers.

    Raises:
        OSError: the port is taken, or the host has no address.
    """

    def __init__(
        self,
        host: str,
        port: int,
        credentials: Credentials | None,
        answer: Answer,
        asks_all: bool = False,
        max_bytes: int = MAX_QUESTION_BYTES,
        record: Record = no_record,
    ):
        self._credentials, self._answer, self._asks_all = credentials, answer, asks_all
        self._record = record
        self._max_bytes, self._num_unread = max_bytes, 0  # bytes of answers
        at = relay.relay_of(host)
        self._listener = listening_socket(host, port) if at is None else socket.socket()
        self.port: int = self._listener.getsockname()[1] if at is None else next(_PORTS_AT_RELAYS)
        self._lock = threading.Lock()
        self._greeting: dict[socket.socket, str] = {}  # with the caller's host, the oldest first
        self._open: set[socket.socket] = set()
        self._closed, self._refusals = threading.Event(), Flood()
        self._versions, self._context = credentials and credentials.versions(), self._new_context()
        self._attendance: relay.Attendance | None = None
        if at is not None:
            token = relay.token_at(host, self.port)
            self._attendance = relay.Attendance(at, token, HANDSHAKE_SECONDS, lambda raw: self._talk_with(raw, at))
        threading.Thread(target=self._accept, name="thinwire-tls", daemon=True).start()

    def close(self, seconds: float = 0.0) -> None:
        """Listen no more, and end all connections, those that were accepted after so many seconds at the latest."""
        self._closed.set()
        end(self._listener)  # wakes the thread
        self._listener.close()
        if self._attendance is not None:
            self._attendance.close()
        deadline = time.monotonic() + seconds
        while self._open and time.monotonic() < deadline:
            time.sleep(0.01)
        with self._lock:
            for connection in (*self._open, *self._greeting):
                end(connection)

    def _new_context(self) -> ssl.SSLContext | None:
        if self._credentials is None:
            return None
        context = self._credentials.context(server=True)
        if self._asks_all:
            context.verify_mode = ssl.CERT_NONE
        return context

    def _accept(self) -> None:
        if self._attendance is not None:
            # At a relay, `Attendance` takes the connections, so that this thread looks at the keys alone.
            while not self._closed.wait(LOOK_SECONDS):
                self._look_at_the_keys()
        for caller in callers(self._listener, self._closed, partial(log.warning, "cannot take a connection: %s")):
            self._look_at_the_keys()
            if caller:
                self._talk_with(*caller)

    def _look_at_the_keys(self) -> None:
        """If there are new keys, or certificates were revoked, end all connections: the others connect again."""
        if self._credentials is None:
            return
        self._credentials.warn_of_expiry()
        with contextlib.suppress(OSError, ValueError):  # they are being written
            if (now := self._credentials.versions()) != self._versions:
                self._credentials = Credentials(self._credentials.folder)
                self._context, self._versions = self._new_context(), now
                with self._lock:
                    for connection in (*self._open, *self._greeting):
                        end(connection)

    def _talk_with(self, connection: socket.socket, address: tuple[str, int]) -> None:
        talk = partial(self._talk, connection, address)
        if why := talk_beside(talk, "thinwire-tls", connection, address[0], self._greeting, MAX_HANDSHAKES, self._lock):
            self._log(address_text(*address), why)

    def _talk(self, raw: socket.socket, address: tuple[str, int]) -> None:
        """The life of one connection."""
        caller = address_text(*address)
        connection: socket.socket | None = None
        try:
            with contextlib.suppress(OSError):
                be_patient(raw, SILENT_SECONDS)
            choose_congestion(raw)
            # It goes over a duplicate of the socket, so that others may end it by `raw`: `ssl` takes over the other one.
            copy = raw.dup()
            copy.settimeout(HANDSHAKE_SECONDS)
            connection, shown = copy, dict[str, Any]()  # of its certificate
            if self._context is not None:
                connection = encrypted = self._context.wrap_socket(
                    copy, server_side=True, do_handshake_on_connect=False
                )
                encrypted.do_handshake()
                shown = encrypted.getpeercert() or {}
            with self._lock:
                # A caller that need not show a certificate has to make way for others until it hangs up.
                if not self._asks_all:
                    self._greeting.pop(raw, None)
                if len(self._open) >= MAX_CONNECTIONS:
                    raise Refused(f"there are {MAX_CONNECTIONS} connections already")
                self._open.add(raw)
            caller = f"{name_in(shown)} at {caller}" if shown else caller
            connection.sendall(ACCEPTED)
            while not self._closed.is_set():
                # Between two questions a client may be silent as long as it likes; `be_patient` finds dead ones.
                connection.settimeout(HANDSHAKE_SECONDS if self._asks_all else None)
                with _waiting(raw, address[0]):
                    question = read_frame(connection, self._max_bytes)
                self._record(0, frame_bytes(question))
                connection.settimeout(UNREAD_SECONDS)
                self._send(connection, self._answered(question))
        except ssl.SSLCertVerificationError as error:
            self._log(caller, WRONG.get(error.verify_code, error.verify_message))
        except (Refused, ssl.SSLError) as error:
            if not isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
                why = getattr(error, "reason", None) or str(error)
                self._log(caller, f"it refuses this worker: {_alert(why)}" if "ALERT_" in why else why)
        except (OSError, ValueError):  # it has hung up, or this listener is being closed
            pass
        finally:
            with self._lock:
                self._greeting.pop(raw, None)
                self._open.discard(raw)
            end(raw)
            raw.close()
            if connection is not None:
                connection.close()

    def _answered(self, question: list[bytes]) -> list[bytes]:
        try:
            return self._answer(question)
        except (ValueError, IndexError, OverflowError) as error:
            raise Refused(f"it asks what has no answer ({error})") from error

    def _send(self, connection: socket.socket, answer: list[bytes]) -> None:
        size = sum(map(len, answer))
        with self._lock:
            self._num_unread += size
        try:
            if size > self._max_bytes and self._num_unread > MAX_UNREAD_BYTES:
                raise Refused(f"more than {MAX_UNREAD_BYTES} bytes of answers wait until somebody reads them")
            send_frame(connection, *answer)
            self._record(frame_bytes(answer), 0)
        except TimeoutError:
            raise Refused(f"it did not read its answer in {UNREAD_SECONDS} seconds") from None
        finally:
            with self._lock:
                self._num_unread -= size

    def _log(self, caller: str, why: str | None) -> None:
        self._refusals.warn("closed a connection from %s: %s", caller, why)


_idle = dict[socket.socket, str]()
"""Connections of all listeners of this process that wait for a question, the longest first, with the callers' hosts."""
_idle_lock = threading.Lock()


@contextlib.contextmanager
def _waiting(connection: socket.socket, host: str) -> Iterator[None]:
    """Context of a connection that waits for a question. Half of the descriptors of this process are for such ones.

    With more, the one of the address with most that waits longest is ended; a worker connects again.

    Raises:
        Refused: it was this one.
    """
    with _idle_lock:
        _idle[connection] = host
        if DESCRIPTORS * len(_idle) > max_descriptors() // 2:
            longest = oldest_of_busiest(_idle)
            del _idle[longest]
            end(longest)
    try:
        yield
    finally:
        with _idle_lock:
            was_ended = _idle.pop(connection, None) is None
        if was_ended:
            raise Refused("of too many connections, its own had asked nothing for longest")


_PORTS_AT_RELAYS = itertools.count(1)
"""A number for each listener of this process that waits at a relay."""


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that listens at the address of a host, or at all of this machine if it has several here, or none.

    Raises:
        OSError: the port is taken, or the host has no address.
    """
    if address := listening_address(host, own_addresses_of(host), is_local=host == "localhost"):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=1024)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=1024)


# ---- the side that connects ----


def connect_tls(host: str, port: int, context: ssl.SSLContext | None, seconds: float) -> socket.socket:
    """Connect with a listener, without TLS if there is no context, and wait until it has accepted this worker.

    Raises:
        Refused: one side does not believe the other's certificate.
        OSError: nobody answers.
    """
    deadline = time.monotonic() + seconds
    at, raw = relay.relay_of(host), relay.dial(host, port, seconds)
    where = address_text(host, port) if at is None else f"who waits at the relay {address_text(*at)}"
    connection = None
    try:
        be_patient(raw, SILENT_SECONDS)
        choose_congestion(raw)
        set_deadline(raw, deadline)
        connection = raw if context is None else context.wrap_socket(raw)
        set_deadline(connection, deadline)
        if connection.recv(1) != ACCEPTED:
            raise ConnectionResetError("it hung up")
        return connection
    except BaseException as error:
        (connection or raw).close()
        if isinstance(error, ssl.SSLCertVerificationError):
            raise Refused(f"{where} is refused: {WRONG.get(error.verify_code, error.verify_message)}") from None
        is_plain = isinstance(error, ssl.SSLEOFError) and is_encrypted(host, port) is False
        if is_plain or getattr(error, "reason", None) == "WRONG_VERSION_NUMBER":
            raise Refused(f"{where} does not speak TLS, so it knows no credentials") from None
        if isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or ""):
            raise Refused(f"{where} refuses this worker: {_alert(error.reason)}") from None
        raise


def is_encrypted(host: str, port: int) -> bool | None:
    """Whether a listener of ours has credentials; None if there is none, or if it does not say so in time."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with dial_small(host, port, PROBE_SECONDS) as raw:
            with contextlib.suppress(TimeoutError):  # with credentials it does not speak first
                if raw.recv(1) == ACCEPTED:
                    return False
            with context.wrap_socket(raw):
                return True
    except OSError:
        return None


def _alert(reason: str) -> str:
    """An alert of the other side, in words."""
    word = reason.rpartition("ALERT_")[2].lower()
    known = {"unknown_ca": 20, "decrypt_error": 7, "certificate_expired": 10, "certificate_revoked": 23}
    return WRONG[known[word]] if word in known else word.replace("_", " ")


class Client:
    """Asks one listener. Threads may ask at once: each has a connection of its own, which the next question may take.

    Args:
        host, port: of the listener.
        credentials: of this worker; None for a listener without.
        record: counts questions and answers.
    """

    def __init__(self, host: str, port: int, credentials: Credentials | None, record: Record = no_record):
        self._host, self._port, self._credentials, self._record = host, port, credentials, record
        self._idle: list[socket.socket] = []

    def connect(self, seconds: float) -> None:
        """Connect ahead of the first question, with a listener that may not have been started yet.

        Args:
            seconds: within which it must take this worker.

        Raises:
            Refused: one side does not believe the other's certificate.
            OSError: the listener does not answer.
        """
        self._idle.append(keep_trying(self._connected, seconds, RETRY_SECONDS, final=(Refused,)))

    def _connected(self, seconds: float) -> socket.socket:
        context = self._credentials.context(server=False) if self._credentials else None
        return connect_tls(self._host, self._port, context, seconds)

    def ask(
        self, *fields: bytes, seconds: float, whole_seconds: float = 0.0, is_repeatable: bool = True
    ) -> list[bytes]:
        """The answer to a question.

        Args:
            fields: the question.
            seconds: to wait for the answer.
            whole_seconds: to wait for a long answer, if that is more, while no part of it is `seconds` late.
            is_repeatable: whether it does no harm to ask twice, if the connection was lost meanwhile.

        Raises:
            Refused: one side does not believe the other's certificate.
            OSError: the listener does not answer.
        """
        deadline = time.monotonic() + seconds
        whole = max(deadline, time.monotonic() + whole_seconds)
        while True:
            try:
                # No check before: another thread may take the last one meanwhile.
                connection, is_new = self._idle.pop(), False
            except IndexError:
                connection, is_new = self._connected(max(0.1, deadline - time.monotonic())), True
            try:
                set_deadline(connection, deadline)
                send_frame(connection, *fields)
                self._record(frame_bytes(fields), 0)
                answer = read_frame(connection, deadline=whole, silent_seconds=seconds)
                self._record(0, frame_bytes(answer))
            except OSError:
                connection.close()
                if is_new or not is_repeatable or time.monotonic() > deadline:
                    raise
                continue
            self._idle.append(connection)
            return answer

    def close(self) -> None:
        """Close the connections that wait for questions."""
        while self._idle:
            self._idle.pop().close()
