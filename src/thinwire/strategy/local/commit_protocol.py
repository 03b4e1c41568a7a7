"""Which changes each round of asynchronous local updates merges: the same on all workers, though nobody waits for all.

Every worker sends its change, encoded once, to all others (`Share`). The *leader*, the worker with the lowest rank, decides
which shares make a round, and tells the others (a *commit*: fragment, version, and the shares by worker and number). Every
worker adds the same shares in rank order. So what they share has the same bits at every version, whenever a worker gets there.

    share     worker -> all       a change of a fragment, how far this worker is, its speed, and its blocks of data
    speed     worker -> all       its speed, in the first period
    commit    leader -> all       the shares of the next version of a fragment, and who has no more
    done      worker -> leader    this worker makes no more changes until all are done
    end       leader -> all       all are done; the last version of each fragment

When a worker is lost, or leaves as agreed, the others agree on a new *view*: the members, and the commits so far.

    ask       coordinator -> all  the lost workers. The coordinator is the lowest rank that is left
    report    worker -> coordinator   its commits; before it, an ask, and the shares of lost workers that it has
    view      coordinator -> all  the new members and all commits; before it, the shares of lost workers
    stop      coordinator -> all  too few are left

Half a round cannot last: a commit that one member knows is in the view of all. A share that is part of a commit reaches all,
because every member keeps the shares of others until all have them. Workers that are cut off do not go on apart: a view needs
more than half of the last one's members, or half of them with its lowest rank. Those who left as agreed do not count. A worker
that was silent for longer than the time limit finds itself left out, and raises an error.

A worker whose messages cannot be read is lost too, and so is one that sends a share of another worker which is not lost. What
the leader decides, and who is lost, is believed.
"""

from __future__ import annotations

import json
import sched
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import messages
from ...comm import CommunicationError, Communicator, Message
from ...comm.messenger import Messenger
from .quorum import Quorum

GONE = 0  # in place of the number of a share: this worker sends no more
ALIGNMENT = 16  # of the payload in a share, so that it may be viewed as floats
MAX_NOTE_BYTES = 1 << 20
VIEW_SECONDS = 60.0  # that a new view may take
_LENGTH = struct.Struct("<q")


class QuorumMessage(IntEnum):
    """The kinds of messages."""

    SHARE = 1
    NOTE = 2


class Share(NamedTuple):
    """The change of one fragment by one worker.

    Args:
        worker: its rank.
        fragment: which.
        number: counts the shares of this worker and fragment, from 1.
        base: the version that the change was measured from.
        tokens: that it was made from; 0 if it is not finite, and has no message.
        blocks: of data that it was made from, if a sampler assigns them.
        wanted: how many this worker wants to have assigned after its round.
        message: (num_bytes,) uint8, as the averager encoded it.
    """

    worker: int
    fragment: int
    number: int
    base: int
    tokens: int
    blocks: int
    wanted: int
    message: Tensor


class CommittedRound(NamedTuple):
    """Its version, its shares in rank order, and the ranks of workers that are gone since the last one."""

    version: int
    shares: list[Share]
    gone: list[int]


class PhaseEnd(NamedTuple):
    """The end of a phase: its number, the last version of each fragment, and the ranks of the members."""

    phase: int
    versions: list[int]
    members: list[int]


class CommitProtocol:
    """Sends shares and learns which of them each round merges; see the module's text. All workers construct it together.

    Args:
        quorum: when a round is committed.
        num_fragments: P.
        comm: connects the workers.
        max_bytes: of a share's message.

    Attributes:
        delay_seconds: how long this worker trains on before it needs the round of its change.
        speeds: the last known speeds of the members by rank, in steps a second. This worker's own is sent with each share.
    """

    def __init__(self, quorum: Quorum, num_fragments: int, comm: Communicator, max_bytes: int):
        self.rank, self._quorum = comm.rank, quorum
        self.delay_seconds, self.speeds = 0.0, {self.rank: 0.0}
        # Reentrant, because `drain` calls `take` while it holds the lock.
        self._lock = threading.RLock()  # guards everything below
        self._changed = threading.Condition(self._lock)
        self._error: CommunicationError | None = None
        self._view, self._members = 0, set(range(comm.size))
        self._lost, self._left = set[int](), set[int]()  # of the members: who is lost, and of these who left as agreed
        self._reports: dict[int, dict[str, Any]] = {}
        self._store: dict[tuple[int, int, int], Share] = {}
        self._fragments = [_Log() for _ in range(num_fragments)]
        self._haves: dict[int, list[int]] = {rank: [0] * num_fragments for rank in self._members}
        self._done: dict[int, int] = {}  # the phase that each has ended
        self._phase = 0  # the last one whose rounds are taken
        self._ended = PhaseEnd(0, [], [])  # the last one that all have ended
        self._alarms, self._alarmed = sched.scheduler(time.monotonic), threading.Condition(self._lock)
        # A share has a head besides, which grows with the fragments as a note does.
        self._messenger = Messenger(comm, max_bytes + MAX_NOTE_BYTES, self._on_message, self._on_lost)
        self._messenger.start()
        threading.Thread(target=self._serve_alarms, name="thinwire-deadlines", daemon=True).start()

    # ---- called by the training ----

    def send(self, fragment: int, base: int, tokens: int, blocks: tuple[int, int], message: Tensor) -> tuple[int, int]:
        """Send this worker's next share of a fragment to all others.

        Args:
            fragment, base, tokens, message: as in `Share`.
            blocks: of data that the share is made from, and that this worker wants.

        Returns:
            The share's number, and the bytes that are sent.
        """
        self.check()
        with self._changed:
            log = self._fragments[fragment]
            log.sent += 1
            payload = self._packed(Share(self.rank, fragment, log.sent, base, tokens, *blocks, message))
            for peer in self._others():
                self._messenger.post(peer, QuorumMessage.SHARE, payload)
            self._keep(self._unpacked(payload)[0])  # a copy: the caller's buffers may change
            return log.sent, len(self._others()) * payload.numel()

    def tell_speed(self) -> None:
        """Tell the others how fast this worker is, before its first share."""
        with self._changed:
            self._tell(self._others(), {"is": "speed", "speed": self.speeds[self.rank]})

    def take(self, fragment: int, up_to: int | None = None) -> list[CommittedRound]:
        """The rounds of a fragment that this worker has not taken yet, in order."""
        with self._changed:
            rounds, taken = self._fragments[fragment].rounds, []
            while rounds and (up_to is None or rounds[0].version <= up_to):
                taken.append(rounds.popleft())
            return taken

    def drain(self) -> list[list[CommittedRound]]:
        """Make no more changes until all members have called it; wait for rounds of the others.

        Returns:
            The next rounds of each fragment; none once all members have called it, and all rounds until then are taken.
        """
        with self._changed:
            phase = self._phase + 1
            if self._done.get(self.rank) != phase:
                self._done[self.rank] = phase
                self._tell(self._others(), {"is": "done", "phase": phase, "have": self._have()})
                self._decide()
            self._wait(lambda: self._ended.phase >= phase or any(log.rounds for log in self._fragments))
            if self._ended.phase < phase:
                return [self.take(fragment) for fragment in range(len(self._fragments))]
            versions = self._ended.versions
            self._wait(lambda: all(log.have >= v for log, v in zip(self._fragments, versions, strict=True)))
            rounds = [self.take(fragment, version) for fragment, version in enumerate(versions)]
            # The caller merges what it gets and calls again; the phase ends with the call that gets nothing.
            self._phase += not any(rounds)
            return rounds

    @property
    def members_at_end(self) -> list[int]:
        """The ranks that took part when all had called `drain`; the same on all workers."""
        return self._ended.members

    def leave(self) -> None:
        """Tell the others that this worker makes no more changes, and hang up."""
        self._messenger.say_goodbye()
        self.close()

    def close(self, wait: bool = True) -> None:
        """Hang up, and wait until what was sent has left."""
        with self._changed:
            self._fail("it has hung up")  # ends the thread of the deadlines
        self._messenger.close(wait)

    def check(self) -> None:
        """Raise the error of this worker, if it had one."""
        if self._error is not None:
            raise self._error

    def is_ready(self, fragment: int, number: int) -> bool:
        """Whether a round with this worker's share can be taken."""
        return self._fragments[fragment].own_ready >= number

    def wait_for(self, fragment: int, number: int) -> None:
        """Wait until a round with this worker's share can be taken.

        Raises:
            CommunicationError: too few workers are left, or this worker was left out.
        """
        with self._changed:
            self._wait(lambda: self.is_ready(fragment, number))

    def _wait(self, is_there: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._error is not None or is_there())
        self.check()

    # ---- messages ----

    def _on_message(self, message: Message) -> None:
        with self._changed:
            if self._error is not None or message.source not in self._members:
                return
            try:
                if message.kind == QuorumMessage.SHARE:
                    self._on_share(message)
                else:
                    self._on_note(message.source, json.loads(bytes(message.payload.tolist())))
            except Exception as error:  # a thread that ended would leave the training waiting
                messages.log.warning(
                    "rank %d goes on without rank %d, which sent what cannot be: %.200r; do all run the same version?",
                    *(self.rank, message.source, error),
                )
                self._messenger.forget(message.source)
                self._lose({message.source}, set())

    def _on_share(self, message: Message) -> None:
        share, speed, have = self._unpacked(message.payload)
        if share.worker == message.source:
            self.speeds[share.worker] = speed
            self._heard(share.worker, have)
        elif share.worker in self._alive:
            raise ValueError(f"a share of rank {share.worker}, which sends its own")
        self._keep(share)

    def _on_note(self, source: int, note: dict[str, Any]) -> None:
        kind = note["is"]
        if kind == "commit":
            if source == self._leader and source not in self._lost and note["view"] == self._view:
                self._learn(note["fragment"], note["version"], note["shares"])
        elif kind == "done":
            self._done[source] = note["phase"]
            self._heard(source, note["have"])
            self._decide()
        elif kind == "speed":
            self.speeds[source] = float(note["speed"])
        elif kind == "end" and source == self._leader:
            # The later phase, because the number of the phase is the first field.
            self._ended = max(self._ended, PhaseEnd(*note["end"]))
            self._changed.notify_all()
        elif kind == "ask":
            self._asked(source, set(note["lost"]), set(note["left"]))
        elif kind == "report":
            self._reported(source, note)
        elif kind == "view":
            if source not in self._lost:  # else another coordinator may have this worker's report already
                self._install_view(note)
        elif kind == "stop":
            self._fail(note["why"])

    def _on_lost(self, peer: int, reason: str | None) -> None:
        with self._changed:
            if self._error is None:
                self._lose({peer}, {peer} if reason is None else set())

    def _tell(self, peers: Iterable[int], note: dict[str, Any]) -> None:
        payload = torch.frombuffer(bytearray(json.dumps(note).encode()), dtype=torch.uint8)
        for peer in peers:
            self._messenger.post(peer, QuorumMessage.NOTE, payload)

    def _packed(self, share: Share) -> Tensor:
        """A share as a message: the length of the head, the head, and the payload."""
        head = {"share": share[:-1], "speed": self.speeds.get(share.worker, 0.0), "have": self._have()}
        text = json.dumps(head).encode()
        text += b" " * (-(_LENGTH.size + len(text)) % ALIGNMENT)
        prefix = torch.frombuffer(bytearray(_LENGTH.pack(len(text)) + text), dtype=torch.uint8)
        return torch.cat([prefix, share.message.cpu()])

    def _unpacked(self, payload: Tensor) -> tuple[Share, float, list[int]]:
        (length,) = _LENGTH.unpack(bytes(payload[: _LENGTH.size].tolist()))
        end = _LENGTH.size + length
        head = json.loads(bytes(payload[_LENGTH.size : end].tolist()))
        worker, fragment, number, base, tokens, blocks, wanted = map(int, head["share"])
        is_known = worker in range(len(self._haves)) and fragment in range(len(self._fragments))
        if not (is_known and number > 0 and min(tokens, blocks, wanted) >= 0):
            raise ValueError(f"share {head['share']}")
        share = Share(worker, fragment, number, base, tokens, blocks, wanted, payload[end:])
        return share, float(head["speed"]), list(map(int, head["have"]))

    # ---- shares and commits ----

    @property
    def _leader(self) -> int:
        return min(self._members)

    def _others(self) -> list[int]:
        return sorted(self._members - {self.rank})

    def _have(self) -> list[int]:
        return [log.have for log in self._fragments]

    def _heard(self, worker: int, have: list[int]) -> None:
        """A worker says which rounds it has; what all have need not be kept."""
        self._haves[worker] = have
        self._haves[self.rank] = self._have()
        for fragment, log in enumerate(self._fragments):
            for shares in log.forget(min(self._haves[rank][fragment] for rank in self._members)):
                for rank, number in shares:
                    self._store.pop((fragment, rank, number), None)

    def _keep(self, share: Share) -> None:
        log = self._fragments[share.fragment]
        is_merged = share.number <= log.merged.get(share.worker, 0)
        if (is_merged or share.worker not in self._members) and not log.is_missing(share.worker, share.number):
            return  # this worker has had it, or it came after the view from which on all have the same shares of a lost worker
        if self._store.setdefault((share.fragment, share.worker, share.number), share) is share:
            self._advance(share.fragment)
            self._decide()

    def _learn(self, fragment: int, version: int, shares: list[list[int]]) -> None:
        """A commit."""
        log = self._fragments[fragment]
        if version <= log.version:  # reports and views repeat what this worker knows
            return
        if version != log.version + 1:
            # `_on_message` takes the sender for lost.
            raise ValueError(f"version {version} of fragment {fragment} after {log.version}")
        log.commit([(int(rank), int(number)) for rank, number in shares])
        self._advance(fragment)

    def _advance(self, fragment: int) -> None:
        """Let the training take the rounds whose shares are all here."""
        log = self._fragments[fragment]
        while log.have < log.version:
            shares = log.shares_of(log.have + 1)
            chosen = [(fragment, rank, number) for rank, number in shares if number != GONE]
            # Rounds are taken in order, so a share that is missing holds all later ones.
            if not all(key in self._store for key in chosen):
                return
            log.have += 1
            gone = [rank for rank, number in shares if number == GONE]
            log.rounds.append(CommittedRound(log.have, [self._store[key] for key in chosen], gone))
            log.own_ready = max([log.own_ready, *(number for _, rank, number in chosen if rank == self.rank)])
        self._changed.notify_all()

    # ---- the leader ----

    def _decide(self) -> None:
        """Commit the rounds that are due, and end the phase when all are done."""
        if self._leader != self.rank or self._error is not None:
            return
        for fragment in range(len(self._fragments)):
            self._decide_round(fragment)
        phase = self._ended.phase + 1
        if all(self._done.get(rank) == phase for rank in self._members):
            self._ended = PhaseEnd(phase, [log.version for log in self._fragments], sorted(self._members))
            self._tell(self._others(), {"is": "end", "end": self._ended})
            self._changed.notify_all()

    def _decide_round(self, fragment: int) -> None:
        log, now = self._fragments[fragment], time.monotonic()
        arrived = self._arrived(fragment)
        if not arrived:
            return
        if log.first_at is None:
            log.first_at = now
            # If no other share comes, only this looks at the round again.
            self._later(self._quorum.patience_seconds, self._decide)
        active = {rank for rank in self._members if self._done.get(rank) != self._ended.phase + 1}
        ranks = {rank for rank, _ in arrived}
        missing = active - ranks
        everyone = len(active | ranks)
        has_quorum = len(ranks) >= min(self._quorum.workers or everyone, everyone)
        if missing and not has_quorum and now < log.first_at + self._quorum.patience_seconds:
            if not self._all_have_come(active):
                return
        elif missing and has_quorum:
            if log.closes_at is None:
                sent = self._messenger.seconds_to_send(max(share.message.numel() for share in self._store.values()))
                log.closes_at = now + self._quorum.grace_seconds(self.delay_seconds, now - log.first_at, sent)
                if log.closes_at > now:
                    self._later(log.closes_at - now, self._decide)
            if now < log.closes_at:
                return
        version = log.version + 1
        gone = set(self._haves) - self._members - log.gone
        shares = [*map(list, arrived), *([rank, GONE] for rank in sorted(gone))]
        note = {"is": "commit", "view": self._view, "fragment": fragment, "version": version, "shares": shares}
        self._tell(self._others(), note)
        self._learn(fragment, version, shares)

    def _arrived(self, fragment: int) -> list[tuple[int, int]]:
        """Rank and number of the shares that no round has merged, in rank order; one of each worker."""
        merged = self._fragments[fragment].merged
        return sorted((r, n) for f, r, n in self._store if f == fragment and n == merged.get(r, 0) + 1)

    def _all_have_come(self, active: set[int]) -> bool:
        """Whether all wait for a round, though of different fragments, so that none of these would get its quorum."""
        come = {rank for fragment in range(len(self._fragments)) for rank, _ in self._arrived(fragment)}
        return active <= come

    # ---- deadlines ----

    def _later(self, seconds: float, do: Callable[[], None]) -> None:
        """Do something after so many seconds."""
        self._alarms.enter(seconds, 0, do)
        self._alarmed.notify_all()

    def _serve_alarms(self) -> None:
        with self._lock:
            while self._error is None:
                # `run` returns the seconds until the next deadline; with None the wait has no end.
                self._alarmed.wait(self._alarms.run(blocking=False))

    # ---- a new view ----

    def _lose(self, lost: set[int], left: set[int]) -> None:
        self._left |= left & self._members
        lost &= self._alive
        if not lost or self._error is not None:
            return
        self._lost |= lost
        self._reports.clear()
        # All lost workers must be known to a report, so the reports are asked for anew.
        coordinator = min(self._alive)
        if coordinator == self.rank:
            self._tell(self._alive - {self.rank}, {"is": "ask", "lost": sorted(self._lost), "left": sorted(self._left)})
            # If this worker alone is left, no report comes.
            self._try_view()
        else:
            self._report(coordinator)

    @property
    def _alive(self) -> set[int]:
        """The members that are not lost; this worker is one of them."""
        return self._members - self._lost

    def _asked(self, source: int, lost: set[int], left: set[int]) -> None:
        if self.rank in lost:
            self._fail(f"left out, because rank {source} heard nothing from this worker for too long")
            return
        is_new = bool(lost & self._alive)
        self._lose(lost, left)
        if not is_new and source == min(self._alive):
            self._report(source)

    def _report(self, coordinator: int) -> None:
        gone = {"lost": sorted(self._lost), "left": sorted(self._left)}
        self._tell([coordinator], {"is": "ask"} | gone)  # so that it takes the shares of these workers
        # Before the report, so that the coordinator has these shares when it makes the view.
        self._forward([coordinator])
        self._tell([coordinator], {"is": "report"} | gone | self._knowledge(self._view, self._members))
        self._later(VIEW_SECONDS, partial(self._give_up, self._view, coordinator))

    def _give_up(self, view: int, coordinator: int) -> None:
        if self._view == view and coordinator in self._alive:
            self._fail(f"rank {coordinator} did not answer within {VIEW_SECONDS:g} seconds after a worker was lost")

    def _forward(self, peers: Collection[int]) -> None:
        """Send on the shares of workers that are lost, now or in an earlier view."""
        for share in list(self._store.values()):
            if share.worker not in self._alive:
                payload = self._packed(share)
                for peer in peers:
                    self._messenger.post(peer, QuorumMessage.SHARE, payload)

    def _knowledge(self, view: int, members: set[int]) -> dict[str, Any]:
        """All that a view of these members must agree on."""
        logs = [[log.first, [log.shares_of(v) for v in range(log.first, log.version + 1)]] for log in self._fragments]
        last = sorted(key for key in self._store if key[1] not in members)
        known = {"logs": logs, "last": last, "ended": self._ended, "done": sorted(self._done.items())}
        return {"view": view, "members": sorted(members)} | known

    def _reported(self, source: int, note: dict[str, Any]) -> None:
        """A report, perhaps from an older or a newer view, if a coordinator died while it told of its view."""
        self._install_view(note)
        if self._error is not None or source not in self._members:
            self._tell([source], {"is": "view"} | self._knowledge(self._view, self._members))  # it is left out
            return
        self._lose(set(note["lost"]), set(note["left"]))
        if self._lost and self._lost <= set(note["lost"]) and min(self._alive) == self.rank:
            self._reports[source] = note
            self._try_view()

    def _try_view(self) -> None:
        """Make a view of the workers that are left, once all of them have reported."""
        alive, others = self._alive, self._alive - {self.rank}
        if not others <= self._reports.keys():
            return
        base = self._members - self._left
        if 2 * len(alive) < len(base) or (2 * len(alive) == len(base) and min(base) not in alive):
            why = f"too few workers are left: {sorted(alive)} of {sorted(base)}"
            self._tell(others, {"is": "stop", "why": why})
            self._fail(why)
            return
        for report in self._reports.values():
            self._know(report)
        # Before the view, so that all have the shares that it names.
        self._forward(others)
        view = {"is": "view"} | self._knowledge(self._view + 1, alive)
        self._tell(others, view)
        self._install_view(view)

    def _know(self, note: Mapping[str, Any]) -> None:
        """Learn the commits that another worker knows."""
        for fragment, (first, commits) in enumerate(note["logs"]):
            for version, shares in enumerate(commits, first):
                self._learn(fragment, version, shares)
        self._done |= {int(rank): int(phase) for rank, phase in note["done"]}
        self._ended = max(self._ended, PhaseEnd(*note["ended"]))

    def _install_view(self, note: Mapping[str, Any]) -> None:
        if note["view"] <= self._view:  # a report carries the view of its sender, which may be older
            return
        members = set(note["members"])
        if self.rank not in members:
            self._fail("left out, because the others heard nothing from this worker for too long")
            return
        self._know(note)
        last = {(fragment, rank, number) for fragment, rank, number in note["last"]}
        for fragment, rank, number in [key for key in self._store if key[1] not in members and key not in last]:
            if number > self._fragments[fragment].merged.get(rank, 0):  # the others do not have it
                del self._store[fragment, rank, number]
        for rank in self._members - members:
            self._messenger.forget(rank)
            self.speeds.pop(rank, None)
        self._view, self._members = note["view"], members
        lost = self._lost & members  # workers of the new view that were lost meanwhile
        self._lost, self._left = set(), set()
        self._reports.clear()
        self._changed.notify_all()
        self._lose(lost, set())
        self._decide()

    def _fail(self, reason: str) -> None:
        if self._error is None:
            self._error = CommunicationError(f"rank {self.rank}: asynchronous local updates have stopped: {reason}")
        self._changed.notify_all()
        self._alarmed.notify_all()


class _Log:
    """The commits of one fragment, from version `first` on; those before, all workers have."""

    def __init__(self) -> None:
        self.first, self.have, self.sent, self.own_ready = 1, 0, 0, 0
        self.rounds: deque[CommittedRound] = deque()  # that the training has not taken
        self.merged: dict[int, int] = {}  # the number of each worker's last share in a commit
        self.gone: set[int] = set()
        self.first_at: float | None = None  # of the next round: when its first share came, and when it closes
        self.closes_at: float | None = None
        self._commits: deque[list[tuple[int, int]]] = deque()

    @property
    def version(self) -> int:
        """Of the last commit; 0 before the first."""
        return self.first + len(self._commits) - 1

    def shares_of(self, version: int) -> list[tuple[int, int]]:
        """Rank and number of the shares of a commit."""
        return self._commits[version - self.first]

    def commit(self, shares: list[tuple[int, int]]) -> None:
        """Append the next version."""
        self._commits.append(shares)
        self.merged |= {rank: number for rank, number in shares if number != GONE}
        self.gone |= {rank for rank, number in shares if number == GONE}
        self.first_at = self.closes_at = None

    def is_missing(self, rank: int, number: int) -> bool:
        """Whether a commit has this share, and this worker may still wait for it."""
        return any((rank, number) in self.shares_of(version) for version in range(self.have + 1, self.version + 1))

    def forget(self, version: int) -> list[list[tuple[int, int]]]:
        """Forget the commits up to a version, and return them."""
        forgotten = []
        while self._commits and self.first <= version:
            forgotten.append(self._commits.popleft())
            self.first += 1
        return forgotten
