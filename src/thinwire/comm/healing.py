"""How a worker that joins or fell behind gets the state of one that is up to date.

State travels over the round's connections, as tensors and plain values only (`state_bytes.py`). Its size is bounded by that of
the worker's own state before memory is taken. A failure on any side gives up the round, and no process ends for it: a worker
that cannot save its state heals nobody any more, and one that cannot be healed is left out after `TRIES`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import debug
from .forming import TRIES
from .handle import CommunicationError, reason_of
from .history import History
from .members import LeftOut, LostRounds, Members, Shared
from .state_bytes import packed, unpacked

if TYPE_CHECKING:
    from .base import Communicator

SIZE_FACTOR, SIZE_SLACK_BYTES = 16, 1 << 26
"""A state is at most so much larger than that of a worker that has not begun: an optimizer's grows with the first step."""
FAILED = -1
log = logging.getLogger("thinwire")


class Healing:
    """Heals others, and lets this worker be healed.

    Attributes:
        shared: more state that is handed over, by name.
        can_heal: whether this worker's state could be saved so far.
    """

    def __init__(self) -> None:
        self.shared: dict[str, Shared] = {}
        self.can_heal = True
        self._failures = 0

    def heal(
        self,
        comm: Communicator,
        members: Members,
        history: History,
        save: Callable[[], Any],
        load: Callable[[Any], None],
    ) -> History | None:
        """Send or get the state; all workers of the round call it. Returns the source's history on those that are healed.

        Args:
            comm: connects the workers of the round.
            members: has the source, and those that are healed.
            history: of this worker.
            save, load: the strategy's state.

        Raises:
            CommunicationError: healing failed; the round is given up.
            LeftOut: this worker could not be healed several times.
            LostRounds: healing would lose rounds that this worker has committed.
        """
        if members.source is None:
            return None
        is_source, is_healed = comm.rank == members.source, comm.rank in members.healed
        payload, failure = torch.empty(0, dtype=torch.uint8, device="cpu"), None
        try:
            if is_source or is_healed:
                payload = self._saved(history, save)
        except Exception as error:
            failure, self.can_heal = error, not is_source
        told = FAILED if failure is not None else payload.numel()
        sizes = comm.all_gather(torch.tensor([told], device="cpu")).wait()
        if failure is not None and is_source:
            raise CommunicationError(f"worker {members.numbers[comm.rank]} cannot save its state: {reason_of(failure)}")
        if failure is not None:
            self._count_failure(members.numbers[comm.rank], reason_of(failure))
        if is_source:
            comm.exchange(dict.fromkeys(members.healed, payload), {}).wait()
        if not is_healed:
            return None
        limit = SIZE_FACTOR * payload.numel() + SIZE_SLACK_BYTES
        received = self._received(comm, members, int(sizes[members.source]), limit)
        return self._loaded(members, received, history, load, members.numbers[comm.rank])

    def _saved(self, history: History, save: Callable[[], Any]) -> Tensor:
        extra = {name: shared.save() for name, shared in self.shared.items()}
        rounds = {"committed": history.committed, "digests": history.digests}
        return packed({"strategy": save(), "shared": extra, "rounds": rounds})

    def _received(self, comm: Communicator, members: Members, size: int, limit: int) -> Tensor:
        assert members.source is not None
        if not 0 < size <= limit:
            source, number = members.numbers[members.source], members.numbers[comm.rank]
            self._count_failure(number, f"worker {source} announced a state of {size} bytes, expected 1 to {limit}")
        received: dict[int, Tensor] = comm.exchange(
            {}, {members.source: debug.empty(size, dtype=torch.uint8, device="cpu")}
        ).wait()
        return received[members.source]

    def _loaded(
        self, members: Members, received: Tensor, history: History, load: Callable[[Any], None], number: int
    ) -> History:
        assert members.source is not None
        source = members.numbers[members.source]
        try:
            state = unpacked(received)
            theirs = History(state["rounds"]["committed"], state["rounds"]["digests"])
            if theirs.committed != members.version.committed or not all(isinstance(d, str) for d in theirs.digests):
                raise ValueError(f"worker {source} sent {theirs.committed} rounds, not {members.version.committed}")
            _refuse_loss(history, theirs, number, source)
            history.forget()  # what is loaded in part is no state of the run
            load(state["strategy"])
            for name, shared in self.shared.items():
                if name in state["shared"]:
                    shared.load(state["shared"][name])
        except LostRounds:
            raise
        except Exception as error:
            self._count_failure(number, reason_of(error))
        self._failures = 0
        return theirs

    def _count_failure(self, number: int, reason: str) -> None:
        """Raise the error that says so."""
        self._failures += 1
        if self._failures >= TRIES:
            raise LeftOut(f"worker {number} is left out of the run: it could not be healed in {TRIES} tries: {reason}")
        raise CommunicationError(f"worker {number} could not be healed: {reason}")


def _refuse_loss(own: History, theirs: History, number: int, source: int) -> None:
    lost = own.num_lost_in(theirs)
    if lost == 1:  # its vote was in doubt
        log.warning("worker %d gives up a round that the others have not committed", number)
    elif lost > 1:
        raise LostRounds(
            f"worker {number} has committed {lost} rounds since round {own.committed - lost} that the newest state, that of "
            f"worker {source} after {theirs.committed} rounds, does not contain: two runs went on at one Lighthouse. "
            "Start this worker again to go on without these rounds"
        )
