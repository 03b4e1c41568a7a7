"""How the workers of a round meet before they connect: in the store of its first worker, which all of them must reach."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch.distributed as dist

from ..addresses import address_text, parse_address
from ..handle import CommunicationError, reason_of
from ..tls.credentials import Credentials
from ..tls.relay import relay_of
from ..tls.store import OwnStore
from .quorums import MAX_WORKERS


class Missing(CommunicationError):
    """Workers that could not be reached, by rank, and why if that is known."""

    def __init__(self, ranks: Iterable[int], why: str = ""):
        self.ranks, self.why = sorted(ranks), why
        super().__init__(f"no connection to ranks {', '.join(map(str, self.ranks))}{f': {why}' if why else ''}")


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
