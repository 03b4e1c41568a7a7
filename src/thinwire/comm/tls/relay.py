"""A relay for workers that can only dial out: it joins pairs of connections and forwards what they say, whatever it is.

    worker -> relay     "thinwire", what it wants, a token     8 + 1 + 32 bytes
    relay  -> worker    one byte, once the other one of the pair is there; then the bytes of the other one

Who waits, and who connects to it, show the same token, which only workers that know the run's secret can compute, or the name
of a listener that waits at the relay; workers tell each other these names. With
credentials, the workers' TLS goes through the relay from end to end, so it forwards what it cannot read. It bounds the
number of connections, the bytes that it keeps for each, and how many from one address wait for their other half.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import secrets
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

from ...messages import log
from ..addresses import address_text, parse_address
from ..handle import CommunicationError
from ..notice import Flood, said_if_late
from ..sockets import be_patient, dial_small, end, keep_trying, max_descriptors, read_exactly

MAGIC = b"thinwire"
HELLO = struct.Struct("<8sc32s")
WAIT, CONNECT, WHO_AM_I = b"w", b"c", b"?"
JOINED = b"j"
TOKEN_BYTES = 32
ADDRESS_BYTES = 64

HELLO_SECONDS = 10.0
SILENT_SECONDS = 10  # after which a line is given up, as workers do
CONNECT_SECONDS = 20.0  # that a connector waits for the other one
MAX_CONNECTIONS = 2048  # half of them from one address
SPARE_DESCRIPTORS, BACKLOG = 128, 64  # for callers that are turned away; asyncio takes so many callers at once
MAX_UNPAIRED = 64  # from one address
BUFFER_BYTES = 1 << 16  # in each direction, twice that in the worst case
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0  # between two tries to wait at a relay


class Half(NamedTuple):
    """A connection that is to be joined with another one."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    joined: asyncio.Future[None]  # the other one is there
    ready: asyncio.Future[bool]  # nobody reads from this one any more; whether it is still there


class Relay:
    """Listens, and forwards until it is closed, in a thread of its own.

    Args:
        host: address of this machine to listen at.
        port: TCP port; 0 takes a free one.

    Raises:
        OSError: the port is taken, this machine does not have the address, or this process has no free descriptors.

    Example:
        >>> with Relay("127.0.0.1") as relay:
        ...     own_address_at(relay.address)
        '127.0.0.1'
    """

    def __init__(self, host: str, port: int = 0):
        self._listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._waiting: dict[tuple[bytes, bytes], list[Half]] = {}  # by token and what they want, the newest last
        self._open: Counter[str] = Counter()  # by address
        self._unpaired: Counter[str] = Counter()
        self._max, self._refusals = _max_connections(), Flood()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stop: Callable[[], None]
        started = Future[None]()
        self._thread = threading.Thread(target=self._main, args=(started,), name="thinwire-relay", daemon=True)
        try:
            self._thread.start()
            started.result()
        except BaseException:
            self._listener.close()
            raise

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up on all. Calling it again does nothing."""
        self._stop()
        self._thread.join()

    def wait(self) -> None:
        """Block until the relay has ended; Ctrl-C gets through."""
        while self._thread.is_alive():
            self._thread.join(1.0)

    def _main(self, started: Future[None]) -> None:
        try:
            with contextlib.closing(self._run(started)) as run:
                asyncio.run(run)
        except Exception as error:
            if started.done():
                raise
            started.set_exception(error)

    async def _run(self, started: Future[None]) -> None:
        loop, stopped = asyncio.get_running_loop(), asyncio.Event()

        def stop() -> None:
            with contextlib.suppress(RuntimeError):  # it was closed before
                loop.call_soon_threadsafe(stopped.set)

        self._stop = stop
        server = await asyncio.start_server(self._serve, sock=self._listener, limit=BUFFER_BYTES, backlog=BACKLOG)
        self._listener.listen(1024)  # more may wait than are taken at once
        started.set_result(None)
        await stopped.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        address = str(writer.get_extra_info("peername")[0])
        self._open[address] += 1
        try:
            loop = asyncio.get_running_loop()
            own = Half(reader, writer, loop.create_future(), loop.create_future())
            self._unpaired[address] += 1
            try:
                other = await self._meet(own, address)
            finally:
                self._unpaired[address] -= 1
                self._unpaired += Counter()  # drops zeros
            if other:
                await _forward(own, other)
            elif own.joined.done():
                await writer.wait_closed()  # the other one forwards for both
        except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # it has gone, or says nothing that a worker says, or the relay closes
        finally:
            self._tasks.discard(task)
            self._open[address] -= 1
            self._open += Counter()
            writer.close()

    async def _meet(self, own: Half, address: str) -> Half | None:
        """Do what a connection asks for; return the one that it is to be joined with, if that was there before."""
        if self._unpaired[address] > MAX_UNPAIRED or 2 * self._open[address] > self._max:
            self._refusals.warn("the relay turned away %s, which has too many connections", address)
            return None
        if len(self._tasks) > self._max:
            self._refusals.warn("the relay turned away %s: it has %d connections already", address, self._max)
            return None
        be_patient(own.writer.get_extra_info("socket"), SILENT_SECONDS)
        magic, want, token = HELLO.unpack(await asyncio.wait_for(own.reader.readexactly(HELLO.size), HELLO_SECONDS))
        if magic == MAGIC and want == WHO_AM_I:
            own.writer.write(address.encode().ljust(ADDRESS_BYTES))
        elif magic == MAGIC and want in (WAIT, CONNECT):
            others = self._waiting.get((token, CONNECT if want == WAIT else WAIT), [])
            if not others:
                await self._wait_for_other(own, token, want)
                return None
            other = others.pop()  # the newest; an older one may have lost its line
            other.joined.set_result(None)
            return other if await other.ready else None
        return None

    async def _wait_for_other(self, own: Half, token: bytes, want: bytes) -> None:
        place = self._waiting.setdefault((token, want), [])
        place.append(own)
        hung_up = asyncio.ensure_future(own.reader.read(1))  # it says nothing before it is joined
        limit = CONNECT_SECONDS if want == CONNECT else None
        try:
            either: set[asyncio.Future[Any]] = {own.joined, hung_up}
            await asyncio.wait(either, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # The read has ended if `cancel` returns False: then this connection has hung up.
            is_there = hung_up.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await hung_up
            own.ready.set_result(is_there)
            if own in place:
                place.remove(own)
            if not place:
                self._waiting.pop((token, want), None)


def _max_connections() -> int:
    """How many connections this process has descriptors for. Without any, asyncio would log each caller, again and again."""
    return min(MAX_CONNECTIONS, max(2, max_descriptors() - SPARE_DESCRIPTORS))


async def _forward(one: Half, other: Half) -> None:
    """Carry bytes both ways until both have ended, or one has failed."""
    try:
        for end in (one, other):
            end.writer.write(JOINED)
        await asyncio.gather(_pump(one.reader, other.writer), _pump(other.reader, one.writer))
    except BaseException:
        for end in (one, other):
            end.writer.transport.abort()
        raise
    for end in (one, other):
        end.writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(BUFFER_BYTES):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


# ---- what workers call ----


def reach(relay: tuple[str, int], want: bytes, token: bytes, seconds: float) -> socket.socket:
    """A connection to the relay, which has been told what this worker wants.

    Raises:
        OSError: the relay cannot be reached. This says nothing about the other worker, so it is not a refusal.
    """
    try:
        connection = dial_small(*relay, seconds)
    except OSError as error:
        raise ConnectionError(f"the relay at {address_text(*relay)}: {error.strerror or error}") from error
    be_patient(connection, SILENT_SECONDS)
    connection.sendall(HELLO.pack(MAGIC, want, token))
    return connection


def await_other(connection: socket.socket, seconds: float | None) -> None:
    """Wait until the relay has joined this connection with another one.

    Raises:
        OSError: the relay has hung up, or nobody came in time.
    """
    connection.settimeout(seconds)
    if connection.recv(1) != JOINED:
        raise ConnectionError("the relay has hung up before the other worker came")


def connect(relay: tuple[str, int], token: bytes, reach_seconds: float, seconds: float, whom: str) -> socket.socket:
    """A connection with the worker that waits at the relay.

    Args:
        relay: its address.
        token: that both workers show.
        reach_seconds: that reaching the relay may take.
        seconds: that all may take.
        whom: what an error calls the other worker.

    Raises:
        OSError: the relay cannot be reached, or the other worker did not come.
    """
    deadline = time.monotonic() + seconds
    connection = reach(relay, CONNECT, token, reach_seconds)
    try:
        await_other(connection, max(0.001, deadline - time.monotonic()))
    except OSError as error:
        connection.close()
        raise ConnectionError(f"{whom} did not come to the relay: {error}") from error
    return connection


class Attendance:
    """Keeps one connection waiting at a relay, in a thread, until it is closed.

    Args:
        relay: its address.
        token: that callers show too.
        seconds: after which the relay is tried anew.
        take: gets each connection that the relay has joined with a caller's, and returns at once.
    """

    def __init__(self, relay: tuple[str, int], token: bytes, seconds: float, take: Callable[[socket.socket], None]):
        self._relay, self._token, self._seconds, self._take = relay, token, seconds, take
        self._waiting: socket.socket | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="thinwire-relay", daemon=True).start()

    def close(self) -> None:
        """Wait no more; connections that were joined stay."""
        self._closed.set()
        with self._lock:
            if self._waiting is not None:
                end(self._waiting)

    def _run(self) -> None:
        pause = FIRST_PAUSE
        while not self._closed.is_set():
            try:
                self._take(self._joined())
                pause = FIRST_PAUSE
            except OSError as error:
                log.debug("%s", error)
                self._closed.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE)

    def _joined(self) -> socket.socket:
        connection = reach(self._relay, WAIT, self._token, self._seconds)
        try:
            with self._lock:
                self._waiting = connection
            # `close` may have come before it could see this connection.
            if self._closed.is_set():
                raise ConnectionAbortedError("closed")
            await_other(connection, None)
        except OSError:
            connection.close()
            raise
        finally:
            with self._lock:
                self._waiting = None
        return connection


def host_at(relay: tuple[str, int]) -> str:
    """A new name under which a worker takes connections at a relay, which stands where others have the host of an address.

    Example:
        >>> host_at(("relay.example.org", 29600)).partition("@")[2]
        'relay.example.org:29600'
    """
    return f"{secrets.token_hex(TOKEN_BYTES)}@{address_text(*relay)}"


def relay_of(host: str) -> tuple[str, int] | None:
    """The relay at which a worker with this host takes connections; None for a host of its own.

    Example:
        >>> relay_of("10.0.0.1"), relay_of(host_at(("::1", 29600)))
        (None, ('::1', 29600))
    """
    name, _, place = host.partition("@")
    if not re.fullmatch(f"[0-9a-f]{{{2 * TOKEN_BYTES}}}", name):
        return None
    try:
        return parse_address(place)
    except ValueError:
        return None


def token_at(host: str, port: int) -> bytes:
    """What the listener and its callers show to the relay; each port of a host has its own."""
    return hashlib.sha256(f"{host.partition('@')[0]} {port}".encode()).digest()


def dial(host: str, port: int, seconds: float) -> socket.socket:
    """A connection with a listener, wherever it takes connections.

    Raises:
        OSError: nobody answers.
    """
    at = relay_of(host)
    if at is None:
        return dial_small(host, port, seconds)
    return connect(at, token_at(host, port), seconds, seconds, "the other worker")


def own_address_at(relay: tuple[str, int], seconds: float = 10.0) -> str:
    """The address that the relay sees this worker come from: not its own one if it is behind NAT.

    Args:
        relay: its address.
        seconds: within which it must answer; it may not have been started yet.

    Raises:
        OSError: the relay cannot be reached, or is none.
    """
    connection = keep_trying(partial(reach, relay, WHO_AM_I, bytes(TOKEN_BYTES)), seconds, FIRST_PAUSE)
    with contextlib.closing(connection):
        try:
            said = read_exactly(connection, ADDRESS_BYTES)
        except ConnectionResetError:
            raise ConnectionError(f"no relay listens at {address_text(*relay)}") from None
    return said.decode("ascii", "replace").strip()


def seen_at(relay: tuple[str, int], seconds: float, who: str) -> str:
    """`own_address_at` for a worker, which says what it waits for.

    Raises:
        CommunicationError: the relay cannot be reached, or is none.
    """
    try:
        with said_if_late(f"{who} waits for the relay at {address_text(*relay)}"):
            return own_address_at(relay, seconds)
    except OSError as error:
        raise CommunicationError(
            f"{who}: {error}; start `thinwire relay` there, or name the relay's address"
        ) from error
