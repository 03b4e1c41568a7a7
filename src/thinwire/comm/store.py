"""Stores of `torch.distributed`, where workers meet.

PyTorch's has no authentication, so it should listen at one address only; the one of runs with credentials is an `OwnStore`.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from .compare import parsed
from .exit import until_exit
from .handle import CommunicationError
from .tls import relay
from .tls.credentials import Credentials
from .tls.store import OwnStore

GAVE_UP = "gave up: "
"""Begins what stands in place of a worker that others have waited for in vain; JSON never begins so."""
ANSWER_SECONDS = 15.0
"""How long a store may take to answer, beyond the time that it is to wait for others."""
Store = dist.Store
"""Any store: PyTorch's, or an `OwnStore`."""
Result = TypeVar("Result")


def answered(ask: Callable[[], Result], seconds: float) -> Result:
    """What `ask` returns, which asks a store. PyTorch's client waits without a limit for a store whose process is stopped.

    Args:
        ask: runs in a thread, which is left behind where no answer comes.
        seconds: how long to wait for it.

    Raises:
        CommunicationError: no answer came.
    """
    outcome: Future[Result] = Future()
    threading.Thread(target=_answer, args=(outcome, ask), name="thinwire-store", daemon=True).start()
    if wait([outcome], seconds).not_done:
        raise CommunicationError(
            f"the store has not answered for {seconds:g} seconds: this worker is cut off from the process that holds it, "
            "worker 0 or the launcher, or that process is stopped"
        )
    try:
        return outcome.result()
    finally:
        del outcome  # an error knows this frame: both, and the store, would live until garbage is collected


def _answer(outcome: Future[Result], ask: Callable[[], Result]) -> None:
    with until_exit():
        try:
            outcome.set_result(ask())
        except BaseException as error:
            outcome.set_exception(error)
        finally:
            del outcome, ask  # as above


def listening_store(
    address: str, port: int, timeout: timedelta, credentials: Credentials | None = None
) -> dist.TCPStore | OwnStore:
    """A store that listens at one address; PyTorch's own listens on all interfaces.

    Args:
        address: of this machine.
        port: TCP port; 0 takes a free one.
        timeout: how long to wait for a key.
        credentials: of this worker; with them the store is an `OwnStore`.

    Raises:
        OSError: the port is taken, or this machine does not have the address.
    """
    if credentials is not None:
        return OwnStore(address, port, timeout, credentials, listens=True)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, port), family=family, backlog=1024) as listener:
        port = listener.getsockname()[1]
        return dist.TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listener.detach(),
        )


def connected_store(
    address: str, port: int, timeout: timedelta, credentials: Credentials | None = None
) -> dist.TCPStore | OwnStore:
    """A client of the store that `listening_store` has made, which it waits for.

    Args:
        address, port: of the store.
        timeout: how long to wait for the store, and then for a key.
        credentials: of this worker.

    Raises:
        RuntimeError: the store does not answer, or refuses this worker.
    """
    if credentials is not None:
        return OwnStore(address, port, timeout, credentials)
    join = partial(dist.TCPStore, address, port, is_master=False, wait_for_workers=False, timeout=timeout)
    return answered(join, timeout.total_seconds() + ANSWER_SECONDS)


def gathering(store: dist.Store, rank: int, size: int, timeout_seconds: float) -> Callable[[Any], list[Any]]:
    """A function that returns what all workers passed in, in rank order, after a round trip through JSON.

    Each call is a meeting. It succeeds on all workers or on none: where one has waited in vain, those who come later learn it.

    Args:
        store: that all workers reach.
        rank, size: this worker, and the number of workers.
        timeout_seconds: how long to wait for the others.

    Raises:
        CommunicationError: by the function; the store failed, or workers did not come in time.
    """

    def gather(value: Any) -> list[Any]:
        return answered(partial(meet, value), timeout_seconds + ANSWER_SECONDS)

    def meet(value: Any) -> list[Any]:
        try:
            meeting = store.add(f"thinwire/{rank}", 1)  # of those over this store; all workers count alike
            keys = [f"thinwire/{meeting}/{other}" for other in range(size)]
            # Each key is written once: by its worker, or by one that has waited for it in vain. So all read the same.
            store.compare_set(keys[rank], "", json.dumps(value))
            try:
                said = _awaited(store, keys, timeout_seconds)
            except dist.DistNetworkError:
                raise  # a silent store does not say who is missing, and each further question would take its time
            except RuntimeError:
                missing = [other for other, key in enumerate(keys) if not store.check([key])]
                why = f"ranks {missing} did not come to the store within {timeout_seconds:g} seconds after rank {rank}"
                for other in missing:
                    store.compare_set(keys[other], "", GAVE_UP + why)
                said = store.multi_get(keys)
            for text in (one.decode(errors="replace") for one in said):
                if text.startswith(GAVE_UP):
                    raise CommunicationError(f"rank {rank}: {text.removeprefix(GAVE_UP)}")
            return [parsed(one, other) for other, one in enumerate(said)]
        except CommunicationError:
            raise
        except RuntimeError as error:
            raise CommunicationError(f"rank {rank}: the store failed: {error}") from error

    return gather


def _awaited(store: dist.Store, keys: list[str], seconds: float) -> list[bytes]:
    """The values of these keys, in one question: each by itself, or waiting for them first, takes round trips more.

    Raises:
        RuntimeError: some of them did not come in time.
    """
    before: timedelta = store.timeout  # type: ignore[attr-defined]  # PyTorch's types lack it
    store.set_timeout(timedelta(seconds=seconds))
    try:
        return store.multi_get(keys)
    finally:
        store.set_timeout(before)


def host_of(store: dist.Store) -> str | None:
    """The host of a `TCPStore` or `OwnStore`, or of the relay where that waits, behind any prefixes; None for others."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, (dist.TCPStore, OwnStore)):
        return None
    at = relay.relay_of(store.host)
    return store.host if at is None else at[0]
