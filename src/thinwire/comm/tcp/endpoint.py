"""A worker's end of connections with others: what makes them, what moves messages over them, and the memory of these.

Collectives and channels (`communicator.py`, `channel.py`) each have endpoints of their own, so that none waits for the other.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import finalize

from torch import Tensor

from ...algorithm import require
from ...messages import log
from ..exit import after_work, before_work_ends
from ..handle import CommunicationError
from ..numbered import TaggedMessage
from .connections import Connections, Contact, Place, WrongContact
from .handshake import SECRET_BYTES

if TYPE_CHECKING:
    from ._engine import Engine

CLOSE_SECONDS = 10.0  # for peers to acknowledge what they have got, where this worker has an error
EXIT_SECONDS = 2.0  # the same, where a script ends without closing
LATE_SECONDS = 15.0  # after which a worker that waits for an operation says so


class Meeting(NamedTuple):
    """A worker, and how it meets the others."""

    rank: int
    size: int
    gather: Callable[[list[Any]], list[Any]]
    """Returns what all workers passed in, in rank order."""
    place: Place
    """Of this worker."""
    timeout_seconds: float
    """How long a peer may be silent, and how long a line may be cut."""
    global_ranks: Sequence[int] = ()
    """As of a communicator."""


def is_available() -> bool:
    """Whether the extension that moves the bytes was built: it needs a compiler and Linux or macOS."""
    try:
        from . import _engine  # noqa: F401
    except ImportError:
        return False
    return True


def require_engine(whose: str = "our own connections") -> None:
    """Check that the extension was built.

    Args:
        whose: what needs it, in words.

    Raises:
        ValueError: it was not.
    """
    require(
        is_available(),
        f"{whose} need the extension thinwire.comm.tcp._engine, which was not built. Install thinwire with a C++17 compiler, "
        "on Linux or macOS.",
    )


class Endpoint:
    """Connects this worker with its peers. All workers construct it together.

    Args:
        meeting: of all workers.
        peers: whom to connect with; if a names b, b must name a.
        is_channel: whether a peer that fails is lost alone; see `native/wire/engine.hpp`.

    Raises:
        ValueError: the extension was not built, or two workers cannot reach each other.
        CommunicationError: the workers could not meet.
    """

    def __init__(self, meeting: Meeting, peers: Sequence[int], is_channel: bool = False):
        require_engine()
        from ._engine import Engine

        _end_threads_at_exit()
        rank, size, gather, place, self._timeout, _ = meeting
        self.connections = Connections(rank, peers, self._timeout, place)
        self.engine = Engine(rank, size, self._timeout, is_channel)
        self._rank, self._peers = rank, peers
        self._notices: set[str] = set()  # that were given
        self._alive: dict[int, list[Tensor]] = {}  # the memory of the engine's operations
        self._lock = threading.Lock()
        self._forgotten = finalize(self, _end, self.engine, self.connections, os.getpid())
        before_work_ends(self._forgotten)
        secret = secrets.token_bytes(SECRET_BYTES).hex() if rank == 0 else ""
        try:
            said = gather([*self.connections.contact, secret])
            contacts = [
                Contact.parsed(peer, one[:-1] if isinstance(one, list) else one) for peer, one in enumerate(said)
            ]
            self.connections.open(self.engine, contacts, _secret_in(said[0][-1]))
        except BaseException:
            self.close(CLOSE_SECONDS)
            raise

    def begin(self, sends: list[TaggedMessage], receives: list[TaggedMessage]) -> int:
        """Start an operation of the engine, and keep its memory alive until it is over."""
        described = [
            [(m.peer, m.number, m.memory.data_ptr(), m.memory.numel()) for m in side] for side in (sends, receives)
        ]
        # Under the lock, because another thread may forget the operation as soon as it is posted.
        with self._lock:
            operation = self.engine.post(*described)
            self._alive[operation] = [message.memory for message in (*sends, *receives)]
        self._forget()
        return operation

    def wait(self, operation: int, limit_seconds: float = math.inf) -> None:
        """Wait for an operation.

        Raises:
            CommunicationError: it failed, or took longer than the limit.
        """
        late, deadline = time.monotonic() + LATE_SECONDS, time.monotonic() + limit_seconds
        try:
            # Now and then, Python looks for signals.
            while not self.engine.wait(operation, max(0.0, min(1.0, deadline - time.monotonic()))):
                if time.monotonic() >= deadline:
                    raise CommunicationError(f"rank {self._rank}: it took longer than {limit_seconds:g} seconds")
                if time.monotonic() >= late:
                    self._say_late()
        except RuntimeError as error:
            reasons = [why for why in map(self.connections.trouble, self._peers) if why and why not in str(error)]
            raise CommunicationError("; ".join([str(error), *reasons[:1]])) from None
        self._forget()

    def _say_late(self) -> None:
        """Say why an operation takes long, each reason once; nothing else is heard until the time limit."""
        cut_off = [str(peer) for peer in self._peers if self.connections.awaits(peer)]
        if cut_off:
            others = f"rank{'s' * (len(cut_off) > 1)} {', '.join(cut_off)}"
            text = f"has no connection with {others}, and waits for one for at most {self._timeout:g} seconds"
        else:
            text = (
                f"waits for messages for more than {LATE_SECONDS:g} seconds: another worker is late, or a line is slow"
            )
        if text not in self._notices:
            self._notices.add(text)
            why = next(filter(None, map(self.connections.trouble, self._peers)), "thinwire doctor measures lines")
            log.warning("rank %d %s (%s)", self._rank, text, why)

    def _forget(self) -> None:
        with self._lock:
            for operation in self.engine.finished():
                self._alive.pop(operation, None)  # `close` forgets all

    def close(self, seconds: float = math.inf) -> None:
        """Hang up once peers have what was sent, at the latest after so many seconds, or the time limit: a line may be cut.

        Calling it again does nothing.
        """
        if self._forgotten.detach():
            deadline = time.monotonic() + min(seconds, self._timeout)
            try:
                while (left := deadline - time.monotonic()) > 0 and not self.engine.drained(min(1.0, left)):
                    pass  # now and then, Python looks for signals
            finally:
                self.engine.close(min(seconds, EXIT_SECONDS))
                self.connections.close()
                self._alive.clear()


def _secret_in(text: Any) -> bytes:
    with contextlib.suppress(TypeError, ValueError):
        if len(secret := bytes.fromhex(text)) == SECRET_BYTES:
            return secret
    raise WrongContact(0, "rank 0 has told no secret of the run")


@functools.cache
def _end_threads_at_exit() -> None:
    from ._engine import end_threads

    after_work(end_threads)


def _end(engine: Engine, connections: Connections, process: int) -> None:
    """Close what nobody closed before the interpreter ends, so that no thread comes back into an interpreter that is gone."""
    # A fork has the finalizer too, but not the threads that these calls wait for.
    if os.getpid() == process:
        engine.close(EXIT_SECONDS)
        connections.close()
