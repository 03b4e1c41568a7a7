"""The Lighthouse, by which workers agree on who takes part, and how a worker asks it.

The Lighthouse believes that a worker lives while its heartbeats come, and each round waits for all that live (`quorums.py`).
A worker sends them only while it makes progress (`Asker.expect`). So one that is stuck is soon left out, though its process
lives. Each question carries a worker's claim (`claims.py`), and each answer those of all that take part.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

from ...messages import log
from ...options import require_integer, require_number
from ..addresses import address_text, own_address
from ..exit import until_exit
from ..tls.connections import Listener
from ..tls.credentials import Credentials
from .claims import MAX_TEXT, Claim, read_claim
from .quorums import QuorumClient, Quorums

HEARTBEAT_SECONDS = 3.0
"""The Lighthouse leaves out a worker after so long without a heartbeat."""
BEAT_SECONDS = 0.2
"""Between two heartbeats."""


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
