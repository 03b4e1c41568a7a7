"""What a Lighthouse does: over TLS in runs with credentials, and else in the clear, where it believes everybody.

Workers send heartbeats, and ask for a round. All that ask get the same answer, once there is a quorum:

    1. all workers of the last quorum ask, with or without others
    2. all that live ask, and they are at least `min_workers`
    3. more than half of those that live ask, so that no two quorums are there at once, and at least `min_workers`; and the
       first one asked `join_seconds` ago

Where nobody was known, there is no quorum within `RESTART_SECONDS` after the first worker is heard: the Lighthouse may have
restarted while a run went on, and new workers must not begin another one before it has heard of the old ones.

A worker lives while its heartbeats come, or until it says that it leaves. A question is asked again every second until it is
answered, so that one whose worker has died is soon forgotten.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from typing import Any, NamedTuple

from ...algorithm import require
from ..addresses import parse_address
from ..tls.connections import Client, Refused, is_encrypted
from ..tls.credentials import Credentials
from .claims import MAX_TEXT, Claim

MAX_WORKERS, MAX_CLAIM_BYTES = 1024, 2048
WAIT_SECONDS, TICK_SECONDS = 1.0, 0.05
RESTART_SECONDS = 1.5
"""After which a Lighthouse that restarts has heard of all workers, from the first one on."""
WAIT, QUORUM, OK = b"wait", b"quorum", b"ok"


class Question(NamedTuple):
    """What a worker asked: its claim, a number that no other question has, and when."""

    claim: str
    nonce: bytes
    first: float
    last: float


class Quorums:
    """Decides who takes part in the next round; see the module's text.

    Args:
        min_workers: fewer do not form a quorum.
        join_seconds: how long a quorum waits for live workers that have not asked for it.
        heartbeat_seconds: a worker is taken for dead after so long without a heartbeat.
    """

    def __init__(self, min_workers: int, join_seconds: float, heartbeat_seconds: float):
        self._min_workers, self._join_seconds, self._heartbeat_seconds = min_workers, join_seconds, heartbeat_seconds
        self._formed = threading.Condition()
        self._beats: dict[str, float] = {}
        self._since = 0.0  # when the first of them was heard
        self._questions: dict[str, Question] = {}
        self._workers: list[str] = []  # of the last quorum
        self._answered: dict[str, bytes] = {}  # their questions
        self._answer = b""

    def answer(self, question: list[bytes]) -> list[bytes]:
        """The answer to a worker's question, its heartbeat, or its farewell.

        Raises:
            ValueError: it is none.
        """
        what, id, *rest = question
        if len(id) > MAX_TEXT:
            raise ValueError(f"a name has at most {MAX_TEXT} bytes")
        with self._formed:
            if what == b"leave":
                self._beats.pop(id.decode(), None)
                self._questions.pop(id.decode(), None)
                return [OK]
            self._beat(id.decode())
            if what == b"beat":
                return [OK]
            if what == b"ask":
                nonce, claim = rest
                return self._ask(id.decode(), nonce, claim)
        raise ValueError(f"unknown question {what!r}")

    def _beat(self, id: str) -> None:
        now = time.monotonic()
        if not self._beats:
            self._since = now
        self._beats[id] = now
        if len(self._beats) > MAX_WORKERS:
            self._forget_dead(now)
        if len(self._beats) > MAX_WORKERS:
            del self._beats[id]
            raise Refused(f"there are {MAX_WORKERS} workers already")

    def _ask(self, id: str, nonce: bytes, claim: bytes) -> list[bytes]:
        if len(claim) > MAX_CLAIM_BYTES or len(nonce) > 32:
            raise ValueError(f"a claim has at most {MAX_CLAIM_BYTES} bytes")
        now = time.monotonic()
        deadline = now + WAIT_SECONDS
        before = self._questions.get(id)
        first = before.first if before is not None and before.nonce == nonce else now
        # An answered question comes again if the answer was lost on the way.
        if self._answered.get(id) != nonce:
            self._questions[id] = Question(claim.decode(), nonce, first, now)
        while self._answered.get(id) != nonce and not self._form() and time.monotonic() < deadline:
            self._formed.wait(TICK_SECONDS)
        return [QUORUM, self._answer] if self._answered.get(id) == nonce else [WAIT]

    def _forget_dead(self, now: float) -> None:
        self._beats = {id: last for id, last in self._beats.items() if now - last < self._heartbeat_seconds}
        self._questions = {
            id: asked
            for id, asked in self._questions.items()
            if id in self._beats and now - asked.last < self._heartbeat_seconds
        }

    def _form(self) -> bool:
        """Form a quorum of those that ask, if it is time."""
        now = time.monotonic()
        self._forget_dead(now)
        asking = sorted(self._questions)
        if not asking or now < self._since + RESTART_SECONDS:
            return False
        if not (self._workers and set(self._workers) <= set(asking)):
            if len(asking) < self._min_workers or 2 * len(asking) <= len(self._beats):
                return False
            waited = now - min(asked.first for asked in self._questions.values())
            if len(asking) < len(self._beats) and waited < self._join_seconds:
                return False
        self._workers = asking
        self._answered = {id: asked.nonce for id, asked in self._questions.items()}
        self._answer = json.dumps([[id, self._questions[id].claim] for id in asking]).encode()
        self._questions = {}
        self._formed.notify_all()
        return True


class QuorumClient:
    """Asks the Lighthouse.

    Args:
        address: of the Lighthouse, "http://host:port", or "https://host:port" if it has credentials.
        credentials: of this worker; None for runs without.
        seconds: within which it must answer.

    Raises:
        ValueError: only one of the Lighthouse and this worker has credentials.
        OSError: it does not answer, or refuses this worker.
    """

    def __init__(self, address: str, credentials: Credentials | None, seconds: float):
        require(
            address.startswith("https://") == (credentials is not None),
            f"the Lighthouse at {address} {'needs' if credentials is None else 'knows no'} credentials; see thinwire keys",
        )
        host, port = parse_address(address.rpartition("//")[2].rstrip("/"))
        # One with credentials would let a plain caller wait.
        is_open = credentials is not None or not is_encrypted(host, port)
        require(is_open, f"the Lighthouse at {address} needs credentials; see thinwire keys")
        self._client = Client(host, port, credentials)
        self._client.connect(seconds)

    def heartbeat(self, id: str, seconds: float) -> None:
        """Say that this worker lives."""
        self._client.ask(b"beat", id.encode(), seconds=seconds)

    def leave(self, id: str, seconds: float) -> None:
        """Say that this worker asks for no more rounds, so that the others need not miss its heartbeats first."""
        self._client.ask(b"leave", id.encode(), seconds=seconds)

    def quorum(self, claim: Claim, seconds: float) -> list[tuple[str, str, Any]]:
        """Ask for a round; returns the id and store of each of its workers, with what else it says of itself.

        That is checked later, and is None if it cannot be read.

        Raises:
            OSError: there was no quorum in time, or the Lighthouse does not answer.
        """
        deadline, nonce = time.monotonic() + seconds, secrets.token_bytes(16)
        question = b"ask", claim.id.encode(), nonce, json.dumps([claim.store, claim.data()]).encode()
        while (left := deadline - time.monotonic()) > 0:
            what, *answer = self._client.ask(*question, seconds=min(left, WAIT_SECONDS) + WAIT_SECONDS)
            if what == QUORUM:
                return _read(answer)
        raise TimeoutError("there was no quorum in time")


def _read(answer: list[bytes]) -> list[tuple[str, str, Any]]:
    """The quorum in an answer.

    Raises:
        ConnectionError: it is none.
    """
    try:
        (claims,) = answer
        return [(str(id), *_said(claim)) for id, claim in json.loads(claims)]
    except (ValueError, TypeError, RecursionError) as error:
        raise ConnectionError(f"the Lighthouse gave an answer that is none: {error}") from None


def _said(claim: str) -> tuple[str, Any]:
    """A worker's store, and what else it says of itself."""
    try:
        store, data = json.loads(claim)
    except (ValueError, TypeError, RecursionError):
        return "", None
    return str(store), data
