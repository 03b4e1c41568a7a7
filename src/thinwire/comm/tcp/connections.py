"""Makes the connections between workers, and makes them anew when they are lost.

Every worker listens on one port, unless it can only dial out. Of two workers, the one with the higher rank connects, or the one
that the other cannot reach; if none reaches the other, both dial a relay (`tls/relay.py`). Both prove that they know the run's
secret (`handshake.py`). With credentials, they do so inside TLS, and each has the certificate of the worker that it says it
is. Then the engine has the socket. The engine reports when a connection was lost and when more of them
would be faster. Lost ones are replaced until the time limit:

    refused      nobody listens there any more: the peer is dead, and that is an error at once
    unreachable  the line may be cut, and may come back: try again, later each time
    silent       large packets may be lost on the way: new connections send small ones (`sockets.dial_small`)

A worker whose peer should connect, but has no connection left with it, tries too: so it learns at once if the peer is dead. If
it cannot dial that peer, it goes by the end of the connections: if the peer's system has closed all of them, and the peer makes
no new ones within a few seconds, it is dead. Through a relay, only the time limit tells.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ...messages import log
from ..addresses import address_text, is_contact
from ..handle import CommunicationError
from ..notice import Flood
from ..sockets import FULL, SMALL_PACKET, callers, dial_small, end, talk_beside
from ..tls import relay
from ..tls.connections import Refused
from .handshake import greet, introduce, proof
from .identity import WorkerIdentity

if TYPE_CHECKING:
    from ..tls.credentials import Credentials
    from ._engine import Engine, Session

MAX_GREETINGS = 64  # that are not finished, at a time; with more, the address that has most loses its oldest one
MAX_REFUSALS = 100  # that are logged at once; in a flood, one a second is
AT_ONCE = 8  # connections to one peer that are being made
MAX_CONNECTIONS = 256  # with one peer: the most that a long line takes, which may have been cut and made anew
HUNG_UP, SILENT = "has hung up", "was silent for too long"  # why a caller is not taken
CONNECT_SECONDS = 3.0  # for the kernel's part; the line may be cut
HANDSHAKE_SECONDS = 20.0  # on a busy machine, the peer may take long to answer
NEAR_CONNECTIONS, FAR_CONNECTIONS = 2, 9  # to begin with: one for small messages, the others for large ones
FAR_SECONDS = 0.015  # round trip of a very long line
REFRESH_SECONDS = 2.0  # between looks at the files of the credentials
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0
GRACE_SECONDS = 5.0  # for a peer that hung up, and that this worker cannot dial, to connect again


class Place(NamedTuple):
    """Where a worker is, and how others reach it."""

    family: socket.AddressFamily
    host: str
    """Its address in its own network; see `own_address`."""
    credentials: Credentials | None = None
    """None for connections that are not encrypted."""
    listens: bool = True
    """Whether others can dial it."""
    relay: tuple[str, int] | None = None
    """Host and port of the run's relay."""
    relay_seconds: float = CONNECT_SECONDS
    """How long to wait for the relay, which may not have been started yet."""


class Contact(NamedTuple):
    """What a worker tells the others about itself."""

    host: str
    port: int
    """0 if it does not listen."""
    seen_as: str
    """The address that the relay sees it come from; empty without a relay."""
    name: str
    """In its certificate."""

    @classmethod
    def parsed(cls, rank: int, values: Any) -> Contact:
        """What another worker says of itself.

        Raises:
            WrongContact: it cannot be true.
        """
        if isinstance(values, list) and len(values) == len(cls._fields):
            host, port, seen_as, name = values
            is_seen = seen_as == "" or is_contact(seen_as, 0)
            if is_contact(host, port) and type(port) is int and is_seen and isinstance(name, str):
                return cls(host, port, seen_as, name)
        raise WrongContact(rank, f"rank {rank} says that it is at {str(values)[:80]!r}, which is no address")

    def is_reached_by(self, other: Contact) -> bool:
        """Whether the other one can dial this one: it listens, and is not behind a NAT, or both are behind the same."""
        return bool(self.port) and self.seen_as in ("", self.host, other.seen_as)


class WrongContact(CommunicationError):
    """The worker `rank` has given an address that cannot be one."""

    def __init__(self, rank: int, message: str):
        self.rank = rank
        super().__init__(message)


class Connections:
    """The connections of one worker.

    Args:
        rank: this worker.
        peers: whom to connect with.
        timeout_seconds: how long a peer may be out of reach.
        place: of this worker.

    Raises:
        ValueError: the credentials cannot be used.
        CommunicationError: the relay cannot be reached.
    """

    def __init__(self, rank: int, peers: Sequence[int], timeout_seconds: float, place: Place):
        self.identity = None if place.credentials is None else WorkerIdentity(place.credentials)
        self._rank, self._peers, self._timeout = rank, peers, timeout_seconds
        seen_as = "" if place.relay is None else relay.seen_at(place.relay, place.relay_seconds, f"rank {rank}")
        self._relay = place.relay
        if place.listens:
            self._listener = socket.create_server((place.host, 0), family=place.family, backlog=1024)
        else:
            self._listener = socket.socket(place.family)
        # Without a listener the port is 0, so that nobody dials this worker.
        port = self._listener.getsockname()[1]
        self.contact = Contact(place.host, port, seen_as, self.identity.name if self.identity else "")
        self._closed, self._refusals = threading.Event(), Flood(MAX_REFUSALS)
        self._greeting: dict[socket.socket, str] = {}  # by caller's host, the oldest first
        self._wanted = dict.fromkeys(self._peers, 0)
        self._attendances: list[relay.Attendance] = []
        self._mending: set[int] = set()
        self._lost: set[int] = set()
        self._failed: dict[int, OSError] = {}  # the last try to connect with a peer
        self._reached: set[int] = set()  # peers with which it has made a connection
        self._small: set[int] = set()  # peers with which a connection was given up
        self._said: set[int] = set()  # of these, and has made a new one
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    @property
    def hosts(self) -> list[tuple[str, str]]:
        """Of all workers, once they are connected: alike for those of one host."""
        return [(one.host, one.seen_as) for one in self._contacts]

    def open(self, engine: Engine, contacts: Sequence[Contact], secret: bytes) -> None:
        """Begin to connect, in the background, and keep up the connections until `close`.

        Args:
            engine: that gets the connections.
            contacts: of all workers, in rank order.
            secret: the run's.

        Raises:
            ValueError: two workers cannot reach each other, and there is no relay.
        """
        self._engine, self._contacts, self._secret = engine, contacts, secret
        for rank, one in enumerate(contacts):
            for lower, other in enumerate(contacts[:rank]):
                if not (self._relay or one.is_reached_by(other) or other.is_reached_by(one)):
                    raise ValueError(
                        f"ranks {lower} and {rank} can only dial out; name a relay that both reach: --relay HOST:PORT"
                    )
        if contacts[self._rank].port:
            self._start(self._accept)
        self._start(self._watch)
        for peer in self._peers:
            engine.connects(peer, self._connects(peer))
            if self._connects(peer):
                self._wanted[peer] = NEAR_CONNECTIONS
                self._mend_soon(peer)
            elif self._is_relayed(peer):
                at, token = self._at_relay(peer)
                caller = f"rank {peer} at the relay"
                greet_soon = partial(self._greet_soon, host=caller, caller=caller)
                self._attendances.append(relay.Attendance(at, token, CONNECT_SECONDS, greet_soon))

    def _reaches(self, peer: int) -> bool:
        return self._contacts[peer].is_reached_by(self._contacts[self._rank])

    def _is_reached_by(self, peer: int) -> bool:
        return self._contacts[self._rank].is_reached_by(self._contacts[peer])

    def _is_relayed(self, peer: int) -> bool:
        return not self._reaches(peer) and not self._is_reached_by(peer)

    def _connects(self, peer: int) -> bool:
        """Whether this worker makes the connections with a peer, and not the peer."""
        if self._reaches(peer) == self._is_reached_by(peer):
            return peer < self._rank
        return self._reaches(peer)

    @property
    def packet_bytes(self) -> int:
        """The most that a packet of a new connection may have, because others were lost; 0 for what the system chooses."""
        return SMALL_PACKET if self._small else 0

    def close(self) -> None:
        """Make no more connections; those that there are belong to the engine, which is closed before."""
        self._hang_up()
        for thread in list(self._threads):
            thread.join()
        self._listener.close()
        with self._lock:
            for connection in self._greeting:
                end(connection)

    def _hang_up(self) -> None:
        self._closed.set()
        end(self._listener)  # wakes the thread that listens, and refuses connections
        for attendance in self._attendances:
            attendance.close()

    def _start(self, call: Callable[[], None]) -> None:
        name = f"thinwire-{call.__name__.strip('_')}"
        thread = threading.Thread(target=call, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _session(self, connection: socket.socket, accepts: bool) -> Session | None:
        return self.identity.session(connection, accepts) if self.identity else None

    # ---- listening ----

    def _accept(self) -> None:
        """Greet all who come, at once, so that a slow or silent one delays no other."""
        warn = partial(log.warning, "rank %d cannot take a connection: %s", self._rank)
        for caller in callers(self._listener, self._closed, warn):
            if caller:
                connection, address = caller
                self._greet_soon(connection, address[0], address_text(*address))

    def _greet_soon(self, connection: socket.socket, host: str, caller: str) -> None:
        most, talk = MAX_GREETINGS + AT_ONCE * len(self._peers), partial(self._greet, connection, caller)
        if why := talk_beside(talk, "thinwire-greet", connection, host, self._greeting, most, self._lock):
            self._refusals.warn("rank %d cannot take a connection from %s: %s", self._rank, caller, why)

    def _greet(self, connection: socket.socket, caller: str) -> None:
        """Take the connection of a worker of the run that proves who it is; end any other."""
        why = ""
        try:
            session = self._session(connection, accepts=True)
            stream, deadline = session or connection, time.monotonic() + HANDSHAKE_SECONDS
            peer, answer = greet(stream, self._rank, self._secret, deadline)
            if peer in self._lost:
                return  # it has ended since
            if peer not in self._wanted:
                raise Refused(f"is rank {peer}, which this worker does not connect with")
            if session and session.peer_name != self._contacts[peer].name:
                raise Refused(self._other_name(peer, session))
            if (have := self._engine.counts(peer).connections) >= MAX_CONNECTIONS:
                raise Refused(f"is rank {peer}, which has {have} connections already")
            stream.sendall(answer)
            self._reached.add(peer)
            self._engine.attach(peer, connection.detach(), session)
        except Refused as error:
            why = str(error)
        except (ConnectionResetError, BrokenPipeError):
            why = HUNG_UP
        except TimeoutError:
            why = SILENT
        except OSError as error:
            why = f"is not of this run: {error}"
        finally:
            with self._lock:
                # `_greet_soon` has removed it already if it made way for others, and that ended the greeting.
                is_sent_away = self._greeting.pop(connection, None) is None
            # After `detach` this closes nothing: the engine has the socket.
            connection.close()
        if why and not self._closed.is_set():
            why = SILENT if is_sent_away else why
            line = ("rank %d closed a connection from %s, which %s", self._rank, caller, why)
            if why == HUNG_UP:  # a worker that ends hangs up too
                log.debug(*line)
            else:
                self._refusals.warn(*line)

    def _other_name(self, peer: int, session: Session) -> str:
        return (
            f"has the certificate of {session.peer_name!r}, and not that of rank {peer}, {self._contacts[peer].name!r}"
        )

    # ---- at the relay ----

    def _at_relay(self, peer: int) -> tuple[tuple[str, int], bytes]:
        """The relay, and what this pair of workers shows to it."""
        assert self._relay is not None
        return self._relay, proof(self._secret, b"relay", max(peer, self._rank), min(peer, self._rank), b"")

    # ---- connecting ----

    def _watch(self) -> None:
        """Do what the engine asks for, until it has ended."""
        from ._engine import ENDED, FAILED, GONE, LOST, RESET, WANT

        while not self._closed.is_set():
            is_renewed = self.identity is not None and self.identity.refresh()
            if is_renewed:
                self._engine.cut()  # new connections are checked against what is new
            for what, peer, number in self._engine.events(REFRESH_SECONDS if self.identity else 60.0):
                if what == FAILED:
                    self._hang_up()
                    return
                if what == GONE:
                    self._lost.add(peer)
                    self._failed.pop(peer, None)
                    continue
                if what == WANT and self._connects(peer):
                    self._wanted[peer] = max(self._wanted[peer], number)
                if what == RESET or (what == LOST and not is_renewed):
                    self._small.add(peer)
                if self._connects(peer) or (what != WANT and number == 0 and self._reaches(peer)):
                    self._mend_soon(peer)
                elif what in (ENDED, RESET) and number == 0 and not self._is_relayed(peer):
                    timer = threading.Timer(GRACE_SECONDS, self._miss, [peer])
                    timer.daemon = True
                    timer.start()

    def _miss(self, peer: int) -> None:
        if not self._closed.is_set() and self._engine.counts(peer).connections == 0:
            why = f"its connections ended, and it made no new ones in {GRACE_SECONDS:g} seconds"
            self._engine.lose(peer, f"rank {peer} has died or hung up: {why}")

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
        return max(self._wanted[peer] - have, int(have == 0))  # only a peer that it can dial has a thread here

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
                self._failed.pop(peer, None)
                until, pause = time.monotonic() + self._timeout, FIRST_PAUSE
                if peer in self._small - self._said:
                    self._said.add(peer)
                    log.warning(
                        "rank %d lost a connection with rank %d, and made a new one, with packets of at most %d bytes: larger "
                        "ones may be lost on the way",
                        *(self._rank, peer, SMALL_PACKET),
                    )
            elif isinstance(error, ConnectionRefusedError) or error.errno in FULL or time.monotonic() > until:
                self._give_up(peer, error)
            else:
                if not isinstance(error, ConnectionResetError):  # who hangs up was reached
                    self._failed[peer] = error
                self._closed.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE)

    def _give_up(self, peer: int, error: OSError) -> None:
        """Do with the connections that there are; without any, the peer is lost."""
        have = self._engine.counts(peer).connections
        if have:
            self._wanted[peer] = min(self._wanted[peer], have)
            log.warning(
                "rank %d makes no more connections with rank %d, which may have ended: %s", self._rank, peer, error
            )
        else:
            self._lost.add(peer)
            self._engine.lose(peer, self._why(peer, error))

    def trouble(self, peer: int) -> str:
        """Why this worker has no connection with a peer that it dials; empty if it knows of no reason."""
        error = self._failed.get(peer)
        return "" if error is None or self._engine.counts(peer).connections else self._why(peer, error)

    def awaits(self, peer: int) -> bool:
        """Whether a connection with a peer is missing, which has not ended."""
        return peer not in self._lost and not self._engine.counts(peer).connections

    def _why(self, peer: int, error: OSError) -> str:
        if self._is_relayed(peer):
            return f"rank {peer} cannot be reached: {error.strerror or error}"
        where = address_text(*self._contacts[peer][:2])
        if isinstance(error, ConnectionRefusedError):
            how = "has died or hung up" if peer in self._reached else "has ended, or a firewall stands before it"
            return f"rank {peer} {how}: {where} refuses connections"
        return f"rank {peer} cannot be reached at {where}: {error.strerror or error}"

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
        # A refusal counts most: nobody listens there any more, so the peer is dead.
        return min(errors, key=lambda error: not isinstance(error, ConnectionRefusedError), default=None)

    def _dial(self, peer: int) -> socket.socket:
        if not self._is_relayed(peer):
            host, port = self._contacts[peer][:2]
            if peer in self._small:
                return dial_small(host, port, CONNECT_SECONDS)
            return socket.create_connection((host, port), CONNECT_SECONDS)
        at, token = self._at_relay(peer)
        return relay.connect(at, token, CONNECT_SECONDS, HANDSHAKE_SECONDS, f"rank {peer}")

    def _connect(self, peer: int, errors: list[OSError]) -> None:
        try:
            connection = self._dial(peer)
            try:
                session = self._session(connection, accepts=False)
                deadline = time.monotonic() + HANDSHAKE_SECONDS
                introduce(session or connection, self._rank, peer, self._secret, deadline)
                if session and session.peer_name != self._contacts[peer].name:
                    raise ConnectionError(f"who listens there {self._other_name(peer, session)}")
                self._reached.add(peer)
                self._engine.attach(peer, connection.detach(), session)
            finally:
                connection.close()
        except OSError as error:
            if isinstance(error, TimeoutError):  # the packets of a handshake with certificates are large
                self._small.add(peer)
            errors.append(error)
            return
        if self._wanted[peer] == NEAR_CONNECTIONS and self._engine.counts(peer).round_trip_seconds > FAR_SECONDS:
            self._wanted[peer] = FAR_CONNECTIONS
