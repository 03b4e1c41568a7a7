"""Makes the connections between workers, and makes them anew when they are lost.

Every worker listens on one port. Of two workers, the one with the higher rank connects; both prove that they know the run's
secret (`handshake.py`). With credentials, they do so inside TLS, and each has the certificate of the worker that it says it
is. Then the engine has the socket. The engine reports when a connection was lost and when more of them
would be faster. Lost ones are replaced until the time limit:

    refused      nobody listens there any more: the peer is dead, and that is an error at once
    unreachable  the line may be cut, and may come back: try again, later each time

A worker whose peer should connect, but has no connection left with it, tries too: so it learns at once if the peer is dead.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from ..connect import name_of
from ..handshake import Greeting, introduce
from .identity import Identity

if TYPE_CHECKING:
    from ..credentials import Credentials
    from ._engine import Engine, Session

MAX_STRANGERS = 64  # that may be greeting at the same time; the oldest has to go
AT_ONCE = 8  # connections to one peer that are being made
CONNECT_SECONDS = 3.0  # for the kernel's part; the line may be cut
HANDSHAKE_SECONDS = 20.0  # on a busy machine, the peer may take long to answer
NEAR_CONNECTIONS, FAR_CONNECTIONS = 2, 9  # to begin with: one for small messages, the others for large ones
FAR_SECONDS = 0.015  # round trip of a very long line
REFRESH_SECONDS = 2.0  # between looks at the files of the credentials
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0
FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # this machine has no place for another connection
Greetings: TypeAlias = "dict[int, tuple[Greeting, Session | None]]"
log = logging.getLogger("thinwire")


class Connections:
    """The connections of one worker.

    Args:
        rank: this worker.
        size: number of workers.
        timeout_seconds: how long a peer may be out of reach.
        own: the address family, and the address to listen at; see `own_address`.
        credentials: this worker's; None for connections that are not encrypted.

    Raises:
        ValueError: the credentials cannot be used.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        timeout_seconds: float,
        own: tuple[socket.AddressFamily, str],
        credentials: Credentials | None = None,
    ):
        self.identity = None if credentials is None else Identity(credentials)
        self._rank, self._peers, self._timeout = rank, [peer for peer in range(size) if peer != rank], timeout_seconds
        family, host = own
        self._listener = socket.create_server((host, 0), family=family, backlog=1024)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self.name = self.identity.name if self.identity else ""  # in this worker's certificate
        self._closed = threading.Event()
        self._wanted = {peer: NEAR_CONNECTIONS if peer < rank else 0 for peer in self._peers}
        self._mending: set[int] = set()
        self._lost: set[int] = set()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def open(self, engine: Engine, addresses: Sequence[tuple[str, int]], names: Sequence[str], secret: bytes) -> None:
        """Begin to connect, in the background, and keep up the connections until `close`.

        Args:
            engine: that gets the connections.
            addresses, names: of all workers, in rank order.
            secret: the run's.
        """
        self._engine, self._addresses, self._names, self._secret = engine, addresses, names, secret
        for call in (self._accept, self._watch):
            self._start(call)
        for peer in self._peers:
            if peer < self._rank:
                self._mend_soon(peer)

    def close(self) -> None:
        """Make no more connections; those that there are belong to the engine, which is closed before."""
        self._hang_up()
        for thread in list(self._threads):
            thread.join()

    def _hang_up(self) -> None:
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that listens
        self._listener.close()

    def _start(self, call: Callable[[], None]) -> None:
        thread = threading.Thread(target=call, name=f"thinwire-{call.__name__.strip('_')}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _session(self, connection: socket.socket, accepts: bool) -> Session | None:
        return self.identity.session(connection, accepts) if self.identity else None

    # ---- listening ----

    def _accept(self) -> None:
        """Greet all who come, at once, so that a slow or silent one delays no other."""
        greetings: Greetings = {}  # by descriptor, the oldest first
        listener, poll = self._listener, select.poll()
        with contextlib.suppress(OSError):
            listener.setblocking(False)
            descriptor_of_listener = listener.fileno()
            poll.register(descriptor_of_listener, select.POLLIN)
            while not self._closed.is_set():
                for descriptor, _ in poll.poll():
                    if descriptor == descriptor_of_listener:
                        self._greet(poll, greetings)
                    elif descriptor in greetings and not greetings[descriptor][0].goes_on():
                        self._end_greeting(poll, greetings, descriptor)
        for greeting, _ in greetings.values():
            greeting.connection.close()

    def _greet(self, poll: select.poll, greetings: Greetings) -> None:
        try:
            connection = self._listener.accept()[0]
        except OSError as error:
            if error.errno in FULL:
                log.warning("thinwire: rank %d cannot take a connection: %s", self._rank, error.strerror)
                self._closed.wait(1.0)  # it would be tried again at once, and again
            elif self._listener.fileno() < 0 or error.errno == errno.EINVAL:
                raise  # closed
            return
        with contextlib.suppress(OSError):  # it hung up at once
            session = self._session(connection, accepts=True)
            greetings[connection.fileno()] = Greeting(connection, self._rank, self._secret, session), session
            poll.register(connection, select.POLLIN)
        if len(greetings) > MAX_STRANGERS + AT_ONCE * len(self._peers):
            self._turn_away(poll, greetings, next(iter(greetings)), "was silent for too long")

    def _end_greeting(self, poll: select.poll, greetings: Greetings, descriptor: int) -> None:
        greeting, session = greetings[descriptor]
        peer = greeting.proven()
        if peer is None or peer not in self._wanted:
            self._turn_away(poll, greetings, descriptor, greeting.why)
        elif session and session.peer_name != self._names[peer]:
            self._turn_away(poll, greetings, descriptor, self._other_name(peer, session))
        elif not greeting.accept():
            self._turn_away(poll, greetings, descriptor, "has hung up")
        else:
            poll.unregister(descriptor)
            del greetings[descriptor]
            self._engine.attach(peer, greeting.connection.detach(), session)

    def _other_name(self, peer: int, session: Session) -> str:
        return f"has the certificate of {session.peer_name!r}, and not that of rank {peer}, {self._names[peer]!r}"

    def _turn_away(self, poll: select.poll, greetings: Greetings, descriptor: int, why: str) -> None:
        connection = greetings.pop(descriptor)[0].connection
        poll.unregister(descriptor)
        log.warning("thinwire: rank %d closed a connection from %s, which %s", self._rank, name_of(connection), why)
        connection.close()

    # ---- connecting ----

    def _watch(self) -> None:
        """Do what the engine asks for, until it has ended."""
        from ._engine import FAILED, LOST, WANT

        while not self._closed.is_set():
            if self.identity and self.identity.refresh():
                self._engine.cut()  # new connections are checked against what is new
            for what, peer, number in self._engine.events(REFRESH_SECONDS if self.identity else 60.0):
                if what == FAILED:
                    self._hang_up()
                    return
                if what == WANT and peer < self._rank:
                    self._wanted[peer] = max(self._wanted[peer], number)
                if what == WANT or (what == LOST and (peer < self._rank or number == 0)):
                    self._mend_soon(peer)

    def _mend_soon(self, peer: int) -> None:
        with self._lock:
            if peer not in self._mending and not self._closed.is_set():
                self._mending.add(peer)
                threading.Thread(target=self._mend, args=(peer,), name="thinwire-connect", daemon=True).start()

    def _missing(self, peer: int) -> int:
        """How many connections this worker has to make."""
        if peer in self._lost:
            return 0
        have = self._engine.counts(peer).connections
        return max(self._wanted[peer] - have, int(have == 0))

    def _mend(self, peer: int) -> None:
        """Connect until there are enough connections, or until there is no use in it."""
        until, pause = time.monotonic() + self._timeout, FIRST_PAUSE
        while True:
            with self._lock:  # a loss that is reported from now on starts another thread
                missing = 0 if self._closed.is_set() else self._missing(peer)
                if not missing:
                    self._mending.discard(peer)
                    return
            error = self._connect_several(peer, missing)
            if error is None:
                until, pause = time.monotonic() + self._timeout, FIRST_PAUSE
            elif isinstance(error, ConnectionRefusedError) or error.errno in FULL or time.monotonic() > until:
                self._give_up(peer, error)
            else:
                self._closed.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE)

    def _give_up(self, peer: int, error: OSError) -> None:
        """Do with the connections that there are; without any, the peer is lost."""
        have = self._engine.counts(peer).connections
        if have:
            self._wanted[peer] = min(self._wanted[peer], have)
            log.warning("thinwire: rank %d makes no more connections with rank %d: %s", self._rank, peer, error)
        else:
            self._lost.add(peer)
            self._engine.lose(peer, self._why(peer, error))

    def _why(self, peer: int, error: OSError) -> str:
        host, port = self._addresses[peer]
        if isinstance(error, ConnectionRefusedError):
            return f"rank {peer} has died or hung up: {host}:{port} refuses connections"
        return f"rank {peer} cannot be reached at {host}:{port}: {error.strerror or error}"

    def _connect_several(self, peer: int, missing: int) -> OSError | None:
        """Make some connections at the same time; return an error, the worst of them, if there were any."""
        errors: list[OSError] = []
        threads = [
            threading.Thread(target=self._connect, args=(peer, errors), daemon=True, name="thinwire-connect")
            for _ in range(min(missing, AT_ONCE))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return min(errors, key=lambda error: not isinstance(error, ConnectionRefusedError), default=None)

    def _connect(self, peer: int, errors: list[OSError]) -> None:
        try:
            connection = socket.create_connection(self._addresses[peer], CONNECT_SECONDS)
            try:
                session = self._session(connection, accepts=False)
                deadline = time.monotonic() + HANDSHAKE_SECONDS
                introduce(session or connection, self._rank, peer, self._secret, deadline)
                if session and session.peer_name != self._names[peer]:
                    raise ConnectionError(f"who listens there {self._other_name(peer, session)}")
                self._engine.attach(peer, connection.detach(), session)
            finally:
                connection.close()
        except OSError as error:
            errors.append(error)
            return
        if self._wanted[peer] == NEAR_CONNECTIONS and self._engine.counts(peer).round_trip_seconds > FAR_SECONDS:
            self._wanted[peer] = FAR_CONNECTIONS
