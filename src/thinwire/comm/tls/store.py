"""A store of our own, where the workers of a run with credentials meet, inside TLS. Those of elastic runs without credentials
meet in one in the clear.

One worker has the keys and values, and answers the others; see `connections.py`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from ..addresses import address_text
from . import relay
from .connections import MAX_FRAME_BYTES, Client, Listener
from .credentials import Credentials

MAX_TABLE_BYTES = 1 << 26
"""Keys and values together; meeting takes some hundred bytes a worker."""
WAIT_SECONDS = 1.0
"""How long one question waits for a key, before it is asked again: a listener waits for no worker that is gone."""
OK, MISSING, FULL = b"ok", b"missing", b"full"

_open = set["OwnStore"]()  # process groups and `PrefixStore` keep the C++ part of a store alive, and not that of Python


class OwnStore(dist.Store):
    """A store of `torch.distributed` whose questions have a limit. With credentials, both sides show certificates of the run.

    Args:
        address: of the worker that listens.
        port: TCP port; with `listens`, 0 takes a free one.
        timeout: how long to wait for the store, and then for a key.
        credentials: of this worker; None answers everybody, without TLS.
        listens: whether this worker has the keys and values, and the others ask it.

    Attributes:
        host, port: of the worker that listens.

    Raises:
        OSError: the port is taken.
        RuntimeError: the store does not answer, or refuses this worker.

    Example:
        >>> import tempfile
        >>> from datetime import timedelta
        >>> from thinwire.comm.tls import keys
        >>> folder = f"{tempfile.mkdtemp()}/keys"
        >>> keys.new_run(folder, "example", "first")
        >>> ours = OwnStore("127.0.0.1", 0, timedelta(seconds=10), Credentials(folder), listens=True)
        >>> theirs = OwnStore("127.0.0.1", ours.port, timedelta(seconds=10), Credentials(folder))
        >>> theirs.set("rank 1", "is here")
        >>> ours.get("rank 1")
        b'is here'
    """

    def __init__(
        self, address: str, port: int, timeout: timedelta, credentials: Credentials | None, listens: bool = False
    ):
        super().__init__()
        self.set_timeout(timeout)
        self._hang_up: Callable[[], None]
        self.host, self._table = address, Table() if listens else None
        if self._table is not None:
            listener = Listener(address, port, credentials, self._table.answer, max_bytes=MAX_FRAME_BYTES)
            self.port, self._hang_up = listener.port, listener.close
        else:
            self._client = Client(address, port, credentials)
            self.port, self._hang_up = port, self._client.close
            try:
                self._client.connect(timeout.total_seconds())
            except OSError as error:
                raise self._silence(error) from error
        _open.add(self)

    def close(self) -> None:
        """Close the connections; the keys go with the worker that listens."""
        _open.discard(self)
        self._hang_up()

    def _ask(self, *question: bytes, seconds: float | None = None, is_repeatable: bool = True) -> list[bytes]:
        if self._table is not None:
            answer = self._table.answer([*question])
        else:
            seconds = self._seconds() if seconds is None else seconds
            try:
                # The listener may wait so long before it answers.
                answer = self._client.ask(*question, seconds=seconds + WAIT_SECONDS, is_repeatable=is_repeatable)
            except OSError as error:
                raise self._silence(error) from error
        if answer[0] == FULL:
            raise dist.DistStoreError(f"the store is full: it holds at most {MAX_TABLE_BYTES} bytes")
        return answer

    def _awaited(self, what: bytes, keys: Sequence[str], limit: float) -> list[bytes]:
        """The answer to a question that is answered once these keys are there: it takes one round trip."""
        deadline = time.monotonic() + limit
        while True:
            left = deadline - time.monotonic()
            milliseconds = str(math.ceil(1000 * max(0.0, min(left, WAIT_SECONDS)))).encode()
            found = self._ask(what, milliseconds, *map(str.encode, keys), seconds=max(left, 0.1))
            if found[0] == OK:
                return found[1:]
            if left <= 0:
                raise dist.DistStoreError(f"wait timeout after {limit:g} seconds, keys: {', '.join(keys)}")

    def _silence(self, error: OSError) -> dist.DistNetworkError:
        at = relay.relay_of(self.host)
        where = address_text(self.host, self.port) if at is None else f"the relay {address_text(*at)}"
        return dist.DistNetworkError(f"the store at {where} does not answer: {error}")

    def _seconds(self) -> float:
        """How long to wait for a key, as `set_timeout` has it."""
        limit: timedelta = self.timeout  # type: ignore[attr-defined]  # PyTorch's types lack it
        return limit.total_seconds()

    # ---- what torch.distributed asks for ----

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(b"set", key.encode(), value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._awaited(b"get", keys, self._seconds())

    def add(self, key: str, number: int) -> int:
        # Asked twice, it would add twice.
        return int(self._ask(b"add", key.encode(), str(number).encode(), is_repeatable=False)[1])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        values = (value.encode() if isinstance(value, str) else bytes(value) for value in (expected, desired))
        return self._ask(b"compare", key.encode(), *values, is_repeatable=False)[1]

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask(b"wait", b"0", *map(str.encode, keys))[0] == OK

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._awaited(b"wait", keys, self._seconds() if timeout is None else timeout.total_seconds())

    def delete_key(self, key: str) -> bool:
        return self._ask(b"delete", key.encode())[0] == OK

    def num_keys(self) -> int:
        return int(self._ask(b"count")[1])

    deleteKey, getNumKeys = delete_key, num_keys  # what C++ calls them


class Table:
    """The keys and values of an `OwnStore`, and the answers to what is asked about them."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._num_bytes, self._changed = 0, threading.Condition()

    def answer(self, question: list[bytes]) -> list[bytes]:
        """The answer to a question.

        Raises:
            ValueError: it is none.
        """
        what, *fields = question
        with self._changed:
            if what in (b"wait", b"get"):
                seconds, keys = min(int(fields[0]) / 1000, WAIT_SECONDS), fields[1:]
                if not self._changed.wait_for(lambda: self._values.keys() >= {*keys}, seconds):
                    return [MISSING]
                return [OK, *([self._values[key] for key in keys] if what == b"get" else [])]
            if what == b"count":
                return [OK, str(len(self._values)).encode()]
            key, *values = fields
            before = self._values.get(key)
            if what == b"set":
                return self._put(key, values[0])
            if what == b"add":
                return self._put(key, str(int(before or b"0") + int(values[0])).encode())
            if what == b"compare":
                # As in PyTorch's stores, a missing key is set only if nothing was expected.
                fits = before == values[0] if before is not None else not values[0]
                return self._put(key, values[1]) if fits else [OK, values[0] if before is None else before]
            if what == b"delete":
                self._num_bytes -= len(key) + len(self._values.pop(key, b"")) if before is not None else 0
                return [MISSING if before is None else OK]
        raise ValueError(f"unknown question {what!r}")

    def _put(self, key: bytes, value: bytes) -> list[bytes]:
        before = self._values.get(key)
        added = len(value) + len(key) if before is None else len(value) - len(before)
        if self._num_bytes + added > MAX_TABLE_BYTES:
            return [FULL]
        self._values[key] = value
        self._num_bytes += added
        self._changed.notify_all()
        return [OK, value]
