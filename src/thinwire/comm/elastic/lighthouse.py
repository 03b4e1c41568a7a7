"""The Lighthouse, by which workers agree on who takes part, and how a worker asks it.

The Lighthouse believes that a worker lives while its heartbeats come, and each round waits for all that live (`quorums.py`).
A worker sends them only while it makes progress (`Asker.expect`). So one that is stuck is soon left out, though its process
lives. Each question carries a worker's claim (`claims.py`), and each answer those of all that take part.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ...options import require_integer, require_number
from ..addresses import address_text, own_address, parse_address
from ..exit import until_exit
from ..handle import CommunicationError, reason_of
from ..tls.connections import Listener
from ..tls.credentials import Credentials
from ..tls.relay import relay_of
from ..tls.store import OwnStore
from .claims import MAX_TEXT, Claim, read_claim
from .quorums import MAX_WORKERS, QuorumClient, Quorums

HEARTBEAT_SECONDS = 3.0
"""The Lighthouse leaves out a worker after so long without a heartbeat."""
BEAT_SECONDS = 0.2
"""Between two heartbeats."""
log = logging.getLogger("thinwire")


class Lighthouse:
    """The place where workers agree on who takes part. One serves a run; workers may come and go. If it ends, start it again at
    the same address. See `ElasticCommunicator` for an example.

    Args:
        min_workers: fewer do not form a quorum.
        host: the address at which workers reach it; None for this machine's.
        port: TCP port; 0 takes a free one.
        join_seconds: how long a quorum waits for live workers that have not asked for it, such as slow ones.
        credentials: of this machine; with them, only workers of the run are heard.

    Attributes:
        address: what workers are given, such as "http://10.0.0.1:29510"; "https://..." with credentials.

    Raises:
        ValueError: a number out of range.
        OSError: the port is taken.
    """

    def __init__(
        self,
        min_workers: int = 2,
        host: str | None = None,
        port: int = 0,
        join_seconds: float = 60.0,
        credentials: Credentials | None = None,
    ):
        require_integer("min_workers", min_workers, 1)
        require_number("join_seconds", join_seconds, least=0)
        host = own_address()[1] if host is None else host
        quorums = Quorums(min_workers, join_seconds, HEARTBEAT_SECONDS)
        listener = Listener(host, port, credentials, quorums.answer)
        scheme = "http" if credentials is None else "https"
        self.address, self.close = f"{scheme}://{address_text(host, listener.port)}", listener.close

    close: Callable[[], None]
    """Stop it."""


@contextlib.contextmanager
def store_at(place: str, limit: timedelta, credentials: Credentials | None = None) -> Iterator[dist.Store]:
    """Context with a client of the store at "host:port/prefix".

    Raises:
        OSError, RuntimeError: it does not answer.
    """
    address, _, prefix = place.partition("/")
    host, port = parse_address(address)
    # PyTorch's store has no limit for most questions: a host that falls silent would keep the others waiting.
    store = OwnStore(host, port, limit, credentials)
    try:
        yield dist.PrefixStore(prefix, store)
    finally:
        store.close()


class Asker:
    """Asks the Lighthouse for rounds, and sends it heartbeats while this worker makes progress.

    Args:
        client: of the Lighthouse; None in a process whose worker has another one that asks.
        id: of this process.
    """

    def __init__(self, client: QuorumClient | None, id: str):
        self._client, self._id = client, id
        self._until = 0.0
        self._is_closed, self._wakened = False, threading.Event()
        self._thread = threading.Thread(target=self._beat, name="thinwire-heartbeat", daemon=True)

    def expect(self, seconds: float) -> None:
        """Say that this worker makes progress; without another call within so many seconds, it counts as stuck."""
        now = time.monotonic()
        was_late, self._until = now >= self._until, now + seconds
        # Its first heartbeat makes the others wait for this worker, so it comes with the first progress.
        if self._client is not None and not self._thread.is_alive() and not self._is_closed:
            self._thread.start()
        if was_late:  # the Lighthouse may believe it dead: let it know before somebody asks for a round
            self._wakened.set()

    def close(self) -> None:
        """Send no more heartbeats, and say so, so that nobody waits for this worker."""
        self._is_closed = True
        self._wakened.set()

    def ask(self, claim: Claim, seconds: float) -> list[Claim]:
        """The claims of all workers that ask, once the Lighthouse has a quorum.

        Raises:
            OSError: there was no quorum within so many seconds, or the Lighthouse restarts.
        """
        assert self._client is not None, "this process asks"
        self.expect(seconds)
        return _claims(self._client.quorum(claim, seconds))

    def _beat(self) -> None:
        assert self._client is not None, "this process asks"
        while not self._is_closed:
            self._wakened.wait(BEAT_SECONDS)
            self._wakened.clear()
            # A worker that is stuck in Python sends none, though this thread goes on.
            if time.monotonic() < self._until and not self._is_closed:
                with contextlib.suppress(Exception), until_exit():  # the Lighthouse restarts
                    self._client.heartbeat(self._id, HEARTBEAT_SECONDS)
        with contextlib.suppress(Exception), until_exit():  # after the last heartbeat, which would bring it back
            self._client.leave(self._id, HEARTBEAT_SECONDS)


def _claims(said: list[tuple[str, str, Any]]) -> list[Claim]:
    """What workers say of themselves, without what cannot be true."""
    claims = {worker: read_claim(worker, store, data) for worker, store, data in said}
    for worker, claim in claims.items():
        if claim is None:
            log.warning("%r takes no part: what it says of itself cannot be true", worker[:MAX_TEXT])
    return [claim for claim in claims.values() if claim is not None]


class Missing(CommunicationError):
    """Workers that could not be reached, by rank, and why if that is known."""

    def __init__(self, ranks: Iterable[int], why: str = ""):
        self.ranks, self.why = sorted(ranks), why
        super().__init__(f"no connection to ranks {', '.join(map(str, self.ranks))}{f': {why}' if why else ''}")


@contextlib.contextmanager
def met(
    store: str, place: str, rank: int, size: int, limit: timedelta, credentials: Credentials | None = None
) -> Iterator[dist.Store]:
    """Context with the store of a round's first worker, once all have come to it.

    Raises:
        Missing: with the ranks that did not come, or that of the store's owner.
    """
    keys = [f"here/{peer}" for peer in range(size)]
    with contextlib.ExitStack() as stack:
        try:
            # The client of a store tries until its limit; here a port that refuses is noticed at once.
            reach([(0, store)], limit)
            found = stack.enter_context(store_at(f"{store}/{place}", limit, credentials))
            found.set(keys[rank], "")
            try:
                found.wait(keys, limit)
            except RuntimeError as error:
                raise Missing([peer for peer, key in enumerate(keys) if not found.check([key])]) from error
        except Missing:
            raise
        except (OSError, RuntimeError) as error:
            raise Missing([0], reason_of(error)) from error
        yield found


def try_sockets(count: int) -> None:
    """Open so many sockets at once, and close them.

    Raises:
        OSError: this process may not open so many.
    """
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(socket.socket())


def reach(stores: Iterable[tuple[int, str]], limit: timedelta) -> None:
    """Try to connect with the stores of some workers, all at once.

    Raises:
        Missing: with the ranks that cannot be reached.
    """
    places = list(stores)
    with ThreadPoolExecutor(MAX_WORKERS) as pool:
        silent = pool.map(lambda place: _silence(place[1], limit), places)
        if missing := {rank: why for (rank, _), why in zip(places, silent, strict=True) if why}:
            raise Missing(missing, next(iter(missing.values())))


def _silence(store: str, limit: timedelta) -> str:
    """Why nothing listens at the address of a store, or of the relay that it waits at; empty if something does."""
    host, _, port = store.rpartition(":")
    place = relay_of(host) or (host.strip("[]"), int(port))
    try:
        socket.create_connection(place, limit.total_seconds()).close()
    except (OSError, OverflowError) as error:
        return f"{address_text(*place)}: {getattr(error, 'strerror', None) or error}"
    return ""
