"""How a worker that joins or fell behind gets the state of those that are up to date.

    1. offer     all that are up to date take a snapshot of their state, and serve it while the round lasts (`snapshot.py`)
    2. begin     the worker that is healed gets what it needs to begin the round, and loads it
    3. finish    it gets and loads what may come later, while the others train already (`transfer.py`)

State travels as tensors and plain values only (`state_bytes.py`). Its size is bounded by that of the worker's own state before
memory is taken. A failure on any side gives up the round, and no process ends for it: a worker that cannot save its state
heals nobody any more, and one that cannot be healed is left out after `TRIES`. The next try goes on with the chunks that have
come.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ...membership import tensors_in
from ...messages import log
from ...streams import hand_over, take_over
from ..handle import CommunicationError, reason_of
from ..members import LeftOut, LostRounds, Members, Shared
from ..tls.connections import Listener, Record, no_record
from ..tls.credentials import Credentials
from .claims import Claim
from .forming import TRIES
from .history import History
from .snapshot import Manifest, Section, Snapshots, root_of
from .state_bytes import packed, unpacked
from .transfer import Source, Transfer

SIZE_FACTOR, SIZE_SLACK_BYTES = 16, 1 << 26
"""A state is at most so much larger than that of a worker that has not begun: an optimizer's grows with the first step."""
ROUNDS = "rounds"


class Healing:
    """Heals others, and lets this worker be healed.

    Args:
        number: of this worker.
        host: address of this machine, at which it serves its state.
        credentials: of this worker.
        tick: is called now and then while this worker waits for a state.
        record: counts what this worker sends and receives.
        process: rank of this process in the worker; it is healed from those of the same rank.
        mesh: of the worker's processes, on which shards lie; None if there is one.
        may_differ: whether states that workers have in common may differ, as where machines compute differently.

    Attributes:
        shared: the parts of the state, by name.
        can_heal: whether this worker's state could be saved so far.
        port: at which it serves its state.
        snapshots: what it serves.
    """

    def __init__(
        self,
        number: int,
        host: str,
        credentials: Credentials | None,
        tick: Callable[[], None] = lambda: None,
        record: Record = no_record,
        process: int = 0,
        mesh: dist.DeviceMesh | None = None,
        may_differ: bool = False,
    ):
        self.shared: dict[str, Shared] = {}
        self.can_heal = True
        self._number, self._credentials, self._tick, self._record = number, credentials, tick, record
        self._process, self._mesh, self._may_differ = process, mesh, may_differ
        self.snapshots = Snapshots()
        self._listener = Listener(host, 0, credentials, self.snapshots.answer, record=record)
        self.port = self._listener.port
        self._failures = 0
        self._held: dict[str, dict[bytes, Tensor]] = {}
        self._transfer: Transfer | None = None
        self._theirs: History | None = None

    def close(self) -> None:
        """Serve nothing more."""
        self._listener.close()

    def share(self, name: str, part: Shared) -> Callable[[], None]:
        """Share a part of the state until the function that is returned is called."""
        self.shared[name] = part

        def end() -> None:
            if self.shared.get(name) is part:
                del self.shared[name]

        return end

    def digest(self) -> str:
        """A hash of what all workers have in common; "" if that is nothing."""
        names = [name for name, shared in self.shared.items() if shared.is_common]
        return root_of({name: Manifest.of(packed(self.shared[name].save())) for name in names}, names) if names else ""

    # ---- a worker that is up to date ----

    def offer(self, key: str, history: History) -> None:
        """Serve this worker's state as it is now.

        Args:
            key: name of the round.
            history: of this worker.
        """
        try:
            self.snapshots.offer(key, self._sections(history))
        except Exception as error:
            # Its next claim says so, and then it is no source any more.
            self.can_heal = False
            # Without sections its answer is "failed", so the joiner need not wait for it.
            self.snapshots.offer(key, {})
            log.warning("worker %d cannot save its state, and heals nobody: %s", self._number, reason_of(error))

    def _sections(self, history: History) -> dict[str, Section]:
        rounds = packed({"committed": history.committed, "digests": history.digests})
        sections: dict[str, Section] = {ROUNDS: rounds}
        for name, shared in self.shared.items():
            # What is late and common does not change within the round, so the training need not wait for a copy.
            is_constant = shared.is_late and shared.is_common
            sections[name] = _packed_later(shared.save()) if is_constant else packed(shared.save())
        return sections

    # ---- a worker that is healed ----

    def begin(
        self, key: str, claims: tuple[Claim, ...], members: Members, history: History, limit_seconds: float
    ) -> None:
        """Load what this worker needs to begin the round.

        Args:
            key: name of the round.
            claims: of the workers of the round.
            members: has the sources.
            history: of this worker; it is forgotten.
            limit_seconds: how long a source may be silent.

        Raises:
            CommunicationError: healing failed; the round is given up.
            LeftOut: this worker could not be healed several times.
            LostRounds: healing would lose rounds that this worker has committed.
        """
        self.end()
        sources = [
            Source(claim.number, f"{claim.store.rpartition(':')[0]}:{claim.state_ports[self._process]}")
            for claim in (claims[rank] for rank in members.sources)
            if self._process < len(claim.state_ports)
        ]
        differing = {name for name, shared in self.shared.items() if not shared.is_common}
        with self._failures_counted():
            self._transfer = Transfer(
                *(self._number, key, sources, differing, self._credentials, limit_seconds, self._held),
                *(self._tick, self._record, self._may_differ),
            )
            manifests = self._agreed(self._transfer, is_late=False)
            # Before the larger sections come, so that a loss of rounds is found first.
            self._theirs = self._history_of(self._transfer.section(ROUNDS), members, history)
            sections = self._fetched(self._transfer, manifests)
            history.forget()  # what is loaded in part is no state of the run
            self._load(sections)

    @property
    def is_under_way(self) -> bool:
        """Whether this worker is being healed."""
        return self._theirs is not None

    def finish(self) -> tuple[History, int]:
        """Load the rest; returns the history that this worker has now, and how many steps of the round it has missed.

        Raises:
            CommunicationError, LeftOut: as in `begin`.
        """
        theirs, transfer = self._theirs, self._transfer
        assert theirs is not None and transfer is not None, "begin comes first"
        with self._failures_counted():
            is_late = any(shared.is_late for shared in self.shared.values())
            self._load(self._fetched(transfer, self._agreed(transfer, is_late=True)))
            # Where nothing comes late, the others have waited.
            steps = transfer.steps() if is_late else 0
        self.end()
        self._failures, self._held = 0, {}
        return theirs, steps

    def end(self) -> None:
        """Close the connections to sources. What has come is kept for another try."""
        if self._transfer is not None:
            self._transfer.close()
        self._transfer = self._theirs = None

    def _agreed(self, transfer: Transfer, is_late: bool) -> dict[str, Manifest]:
        """The manifests of the parts that are loaded now.

        The chunks of this worker's own state are held, so that equal ones do not travel.
        """
        parts = {name: shared.save for name, shared in self.shared.items() if shared.is_late == is_late}
        names, limit = [*parts] if is_late else [ROUNDS, *parts], SIZE_SLACK_BYTES
        if not names:
            return {}
        for name, save in parts.items():
            section = packed(save())
            own, held = Manifest.of(section), self._held.setdefault(name, {})
            limit += SIZE_FACTOR * len(section)
            for number in range(own.num_chunks):
                held.setdefault(own.hash(number), section[own.place(number)])
        manifests = transfer.agree(names)
        announced = sum(manifest.num_bytes for manifest in manifests.values())
        # Before memory for it is taken.
        if announced > limit:
            who = transfer.sources[0].number
            raise ValueError(f"worker {who} announced a state of {announced} bytes, expected at most {limit}")
        return manifests

    def _history_of(self, section: Tensor, members: Members, history: History) -> History:
        assert members.source is not None
        state, source = unpacked(section), members.numbers[members.source]
        theirs = History(state["committed"], state["digests"])
        if theirs.committed != members.version.committed or not all(isinstance(d, str) for d in theirs.digests):
            raise ValueError(f"worker {source} sent {theirs.committed} rounds, not {members.version.committed}")
        _refuse_loss(history, theirs, self._number, source)
        return theirs

    def _fetched(self, transfer: Transfer, manifests: dict[str, Manifest]) -> dict[str, Tensor]:
        return {name: transfer.section(name) for name in self.shared if name in manifests}

    def _load(self, sections: dict[str, Tensor]) -> None:
        for name, section in sections.items():
            self.shared[name].load(unpacked(section, self._mesh))

    @contextlib.contextmanager
    def _failures_counted(self) -> Iterator[None]:
        """Context of a part of healing: what fails in it gives up the round, and after some tries this worker."""
        try:
            yield
        except (LostRounds, CommunicationError):  # these are no fault of what was sent
            raise
        except Exception as error:
            self._failures += 1
            who, reason = f"worker {self._number}", reason_of(error)
            if self._failures >= TRIES:
                raise LeftOut(
                    f"{who} is left out of the run: it could not be healed in {TRIES} tries: {reason}"
                ) from error
            raise CommunicationError(f"{who} could not be healed: {reason}") from error


def _packed_later(state: Any) -> Callable[[], Tensor]:
    """What packs a state in another thread, after the work that the caller has queued on its tensors."""
    made = [(t, hand_over(t)) for t in tensors_in(state)]

    def make() -> Tensor:
        for t, event in made:
            take_over(t, event)
        return packed(state)

    return make


def _refuse_loss(own: History, theirs: History, number: int, source: int) -> None:
    lost = own.num_lost_in(theirs)
    if lost == 1:  # its vote was in doubt
        log.warning("worker %d gives up a round that the others have not committed", number)
    elif lost > 1:
        raise LostRounds(
            f"worker {number} has committed {lost} rounds since round {own.committed - lost} that the newest state, that of "
            f"worker {source} after {theirs.committed} rounds, does not contain: two runs went on apart. To go on without "
            "these rounds, move this worker's checkpoints away, and start it again"
        )
