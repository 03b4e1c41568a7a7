"""How a worker forms a round: it asks the Lighthouse who takes part, and connects with them.

A worker whose number or configuration is wrong, or that the others cannot reach, learns here that it takes no part.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from ..addresses import own_address, parse_address
from ..compare import ABSENT, excerpt, fingerprint, parsed
from ..handle import CommunicationError, reason_of
from ..members import LeftOut
from ..notice import START_SECONDS, said_if_late
from ..tls.connections import Refused
from ..tls.credentials import Credentials
from ..tls.relay import host_at, seen_at
from ..tls.store import OwnStore
from .claims import Claim, at_relay, choose, place_of, read_claim
from .groups import Groups
from .history import History
from .lighthouse import HEARTBEAT_SECONDS, Asker
from .meeting import Missing, met, reach, store_at, try_sockets
from .quorums import QuorumClient
from .replica import Processes

CONNECT_SECONDS = 5.0
"""How long workers of a new round wait for each other; longer after some failures in a row."""
TRIES = 3
"""To reach a worker, before one of the two is left out."""
LEFT_OUT_SECONDS = 60.0
"""Until the others try again to reach a worker that was left out."""
RETRY_SECONDS = 0.2
"""Before a worker asks a Lighthouse again that did not answer."""
TOO_FEW_SECONDS = 1.0
"""Until a worker asks again where too few take part; meanwhile the Lighthouse hears of more."""
OTHERS = "configuration of process"
"""Begins the names of settings that are hashes, which say less than those of process 0."""
NO_DESCRIPTORS = os.strerror(errno.EMFILE)


class Forming:
    """Forms the rounds of one worker.

    Args:
        number: of the worker.
        lighthouse: address of the Lighthouse.
        min_workers: fewer do not begin a round.
        quorum_seconds: how long to wait for other workers, or for the Lighthouse.
        groups: the round's connections, which are made anew whenever the workers change.
        processes: of this worker.
        credentials: of this worker; None for runs without.
        listens, relay: see `ElasticCommunicator`.

    Attributes:
        asker: asks the Lighthouse, and sends it heartbeats.
        settings: what all workers must have in common, by name.
        place: name of the live connections, "" for none.
        host: address of this machine, or where others reach it at the relay.

    Raises:
        CommunicationError: the Lighthouse does not answer.
        ValueError: it and this worker do not have credentials of one run.
    """

    def __init__(
        self,
        number: int,
        lighthouse: str,
        min_workers: int,
        quorum_seconds: float,
        groups: Groups,
        processes: Processes,
        credentials: Credentials | None = None,
        listens: bool = True,
        relay: str | None = None,
    ):
        self._credentials, self._processes = credentials, processes
        self._number, self._lighthouse, self._min_workers = number, lighthouse, min_workers
        self._quorum_seconds, self._groups = quorum_seconds, groups
        self.settings = {"processes of a worker": repr(processes.size)}
        self.place, self._size, self._failures, self._why = "", 1, 0, ""
        self._missed: dict[int, int] = {}
        self._left_out: dict[int, float] = {}
        self.host, self._id = own_address()[1], f"worker_{number:06d}_{secrets.token_hex(8)}"
        self._relay = None if relay is None else parse_address(relay)
        if self._relay is not None:
            self.settings["relay"] = str(relay)
            seen_as = seen_at(self._relay, min(quorum_seconds, START_SECONDS), f"worker {number}")
            if not listens or seen_as != self.host:  # others do not reach it, or it is behind NAT
                self.host = host_at(self._relay)
        self._store: OwnStore | None = None
        if processes.rank:
            self.asker = Asker(None, self._id)
            return
        try:
            with said_if_late(f"worker {number} waits for the Lighthouse at {lighthouse}"):
                client = QuorumClient(lighthouse, credentials, min(quorum_seconds, START_SECONDS))
            self.asker = Asker(client, self._id)
        except Refused as error:
            raise ValueError(
                f"worker {number}: no connection with the Lighthouse at {lighthouse}, because {error}; check --lighthouse and "
                "--credentials (see thinwire keys)"
            ) from error
        except OSError as error:
            raise CommunicationError(
                f"worker {number}: the Lighthouse at {lighthouse} does not answer ({error}); start one, or check --lighthouse"
            ) from error
        # Others read this worker's settings in its store. A round meets in the store of its first worker.
        self._store = OwnStore(self.host, 0, timedelta(seconds=quorum_seconds), credentials, listens=True)

    def claims(
        self, seconds: float, history: History, rank: int, can_heal: bool, digest: str, state_port: int
    ) -> tuple[Claim, ...]:
        """Those of the workers that take part in the next round, in rank order.

        Args:
            seconds: to wait for a quorum.
            history: of this process. If those of the worker's processes differ, the worker has no state, and they are
                forgotten.
            rank, can_heal, digest, state_port: of this process; see `Claim`.

        Raises:
            CommunicationError: there was no quorum.
            LeftOut: this worker and another one do not reach each other, or another of its processes has died.
            ValueError: this worker's number or configuration is wrong.
        """
        own = [*history.version, history.digests[-1], can_heal, digest, state_port, fingerprint(self.settings).hex()]
        of_all = self._processes.gather([*own, self.place])
        *versions, heals, digests, ports, configurations, places = zip(*of_all, strict=True)
        # Shards of different rounds, as from different checkpoints, make no state.
        if any(len(set(values)) > 1 for values in versions):
            history.forget()
        if len(set(places)) > 1:  # one of the processes has lost its connections
            self.give_up()
        if len(digests) > 1:
            # Each process has hashed its own shards; the worker's digest is of all of them.
            digest = hashlib.sha256(" ".join(digests).encode()).hexdigest() if all(digests) else ""
        if self._processes.rank == 0:
            names = (f"{OTHERS} {process}" for process in range(1, len(configurations)))
            # Process 0 alone tells others its settings, so those of its other processes go along as hashes.
            self.settings |= dict(zip(names, configurations[1:], strict=True))
        claim = partial(self._claim, history, rank, all(heals), digest, ports)
        claims = self._processes.on_first(lambda: self._chosen(claim, time.monotonic() + seconds))
        members = (read_claim(id, store, data) for id, store, data in claims)
        return tuple(member for member in members if member is not None)

    def _chosen(self, claim: Callable[[], Claim], deadline: float) -> list[Any]:
        """The claims of those that take part, as plain values."""
        same_number = None
        while True:
            choice = choose(self._asked(claim, deadline))
            taken = choice.taken.get(self._id)
            if taken is None:
                break
            # A new nonce shows that the other worker has asked again since, so it lives.
            if same_number is not None and same_number.nonce != taken.nonce:
                raise self._refused(f"its number is that of another worker, which lives; its store is {taken.store}")
            same_number = taken  # it may have died after it asked; then it does not ask again
            # No heartbeats meanwhile, else the others would wait for this worker.
            self.asker.expect(0)
            time.sleep(HEARTBEAT_SECONDS / 2)
        if other := choice.differing.get(self._id):
            raise self._refused(self._difference(other))
        if other := choice.unreached.get(self._id):
            if self._relay is None:
                cause = f"a firewall stands between {self.host} and {other.store.rpartition(':')[0]}"
            else:
                cause = f"the relay at {self.settings['relay']} runs, and both reach it"
            raise LeftOut(
                f"worker {self._number} is left out of the run: it and worker {other.number} did not reach each other in "
                f"{TRIES} tries{self._why}; see whether {cause}, and whether this process can open sockets"
            )
        if all(member.id != self._id for member in choice.members):
            raise ValueError(
                f"worker {self._number} takes no part: the Lighthouse at {self._lighthouse} answers without a claim of it that "
                "can be true; see the lines above, and whether all machines run the same version of thinwire"
            )
        return [[member.id, member.store, member.data()] for member in choice.members]

    def connect(self, claims: tuple[Claim, ...]) -> int:
        """Connect with these workers, unless this worker is; returns its rank.

        Raises:
            CommunicationError: a worker did not come, or there are too few.
            LeftOut: this process cannot open the sockets that the round needs.
        """
        size = len(claims)
        if size < self._min_workers:
            time.sleep(TOO_FEW_SECONDS)
            what = f"waits for {self._min_workers} workers, and has {size} so far"
            raise CommunicationError(f"worker {self._number}: the Lighthouse {what}")
        rank = [claim.number for claim in claims].index(self._number)
        if not self.place or {claim.connection for claim in claims} != {self.place} or size != self._size:
            self._connect_anew(claims, rank)
        return rank

    def awaited(self) -> str:
        """What this worker waits for, in words, while it is not connected with others."""
        workers = f"{self._min_workers} worker{'s' * (self._min_workers > 1)}"
        what = f"a round of at least {workers}, at the Lighthouse {self._lighthouse}"
        limit = f"for at most {self._quorum_seconds:g} seconds"
        return f"worker {self._number} waits for {what}, {limit}"

    def give_up(self) -> None:
        """Connections are lost: the next round connects anew."""
        self.place = ""

    def close(self) -> None:
        """Stop answering the others of this run."""
        if self._store is not None:
            self._store.close()

    # ---- parts of the above ----

    def _claim(self, history: History, rank: int, can_heal: bool, digest: str, state_ports: tuple[int, ...]) -> Claim:
        assert self._store is not None, "process 0 asks"
        # Written once: the settings are complete when the first round is asked for.
        if not self._store.check(["own/settings"]):
            self._store.set("own/settings", json.dumps(self.settings))
        now = time.monotonic()
        return Claim(
            id=self._id,
            store=f"{self.host}:{self._store.port}",
            number=self._number,
            version=history.version,
            history=history.digests[-1],
            settings=fingerprint(self.settings).hex(),
            connection=self.place,
            rank=rank,
            nonce=secrets.token_hex(8),
            failures=self._failures,
            unreachable=tuple(number for number, until in self._left_out.items() if until > now),
            can_heal=can_heal,
            digest=digest,
            state_ports=state_ports,
        )

    def _asked(self, claim: Callable[[], Claim], deadline: float) -> list[Claim]:
        """The Lighthouse's answer. It may restart meanwhile."""
        while True:
            try:
                return at_relay(self.asker.ask(claim(), max(deadline - time.monotonic(), 0.1)), self._relay)
            except Refused as error:
                raise CommunicationError(f"worker {self._number}: {error}") from error
            except (OSError, ValueError) as error:  # a ValueError while this worker's credentials are replaced
                if time.monotonic() + RETRY_SECONDS > deadline:
                    raise CommunicationError(
                        f"worker {self._number}: no quorum of {self._min_workers} workers within "
                        f"{self._quorum_seconds:g} seconds; see whether enough workers run, and whether they reach the "
                        f"Lighthouse at {self._lighthouse} ({reason_of(error)})"
                    ) from error
                if self.place:  # others may have had an answer, and wait for this worker in a round
                    self._groups.hang_up()
                    self.give_up()
                time.sleep(RETRY_SECONDS)

    def _difference(self, other: Claim) -> str:
        """How this worker's configuration differs from another one's."""
        start = f"its configuration differs from that of worker {other.number}"
        try:
            with store_at(f"{other.store}/own", timedelta(seconds=CONNECT_SECONDS), self._credentials) as store:
                theirs = {str(key): str(value) for key, value in parsed(store.get("settings"), other.number).items()}
        except Exception as error:
            return f"{start}, which does not say how ({reason_of(error)})"
        lines = [
            f"{key}: {excerpt(mine, 0)} here, {excerpt(their, 0)} there"
            for key in dict.fromkeys([*self.settings, *theirs])
            if (mine := self.settings.get(key, ABSENT)) != (their := theirs.get(key, ABSENT))
        ]
        lines = [line for line in lines if not line.startswith(OTHERS)] or lines
        return f"{start}: {'; '.join(lines[:3])}{f'; and {len(lines) - 3} more' if len(lines) > 3 else ''}"

    def _refused(self, reason: str) -> ValueError:
        return ValueError(f"worker {self._number} is refused, and the others go on without it: {reason}")

    def _connect_anew(self, claims: tuple[Claim, ...], rank: int) -> None:
        place, self.place, self._size = place_of(claims), "", len(claims)
        limit = timedelta(seconds=CONNECT_SECONDS * (1 + self._failures // 2))
        meeting = f"{place}.{self._processes.rank}"  # process r connects with process r of the others
        failed: tuple[str, list[int], str] | None = None
        try:
            # It fails before it meets the others, if it cannot open the sockets that the round needs.
            try_sockets(2 * len(claims) + 8)
            with met(claims[0].store, meeting, rank, len(claims), limit, self._credentials) as store:
                if any(claim.failures for claim in claims):  # find out who does not reach whom
                    reach([(r, claim.store) for r, claim in enumerate(claims) if r != rank], limit)
                self._groups.connect(store, rank, len(claims), limit)
        except Exception as error:
            if NO_DESCRIPTORS in str(error):  # others do not learn it, and would wait for it in each round
                raise LeftOut(
                    f"worker {self._number} leaves the run: it cannot open the sockets of a round with {len(claims)} workers "
                    f"({NO_DESCRIPTORS}); raise the limit of open files (ulimit -n), and start it again"
                ) from error
            missing = {claims[rank].number for rank in error.ranks} if isinstance(error, Missing) else set[int]()
            failed = reason_of(error), sorted(missing - {self._number}), error.why if isinstance(error, Missing) else ""
        if failures := [one for one in self._processes.gather(failed) if one is not None]:
            self._count_failure({number for _, missing, _ in failures for number in missing})
            self._why = next((f" ({why})" for *_, why in failures if why), self._why)
            raise CommunicationError(f"worker {self._number}: cannot connect to the other workers: {failures[0][0]}")
        self.place, self._failures, self._missed, self._why = place, 0, {}, ""

    def _count_failure(self, missing: set[int]) -> None:
        self._failures += 1
        # Only failures in a row count: a worker that was reached in between begins again at 0.
        self._missed = {number: 1 + self._missed.get(number, 0) for number in missing}
        until = time.monotonic() + LEFT_OUT_SECONDS
        self._left_out |= {number: until for number, times in self._missed.items() if times >= TRIES}
