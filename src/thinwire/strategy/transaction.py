"""The rounds of a strategy as transactions: all workers of a round keep its results, or none does.

On an elastic communicator (`comm/elastic/communicator.py`) a round is formed before it begins: workers that join are healed
from a live one, and averagers hear who takes part. At its end all workers vote. If one has died or fallen silent, all others go
back to where the round began. On any other communicator the workers never change, and nothing here does anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ..average.base import Averager, NamedTensors
from ..comm import CommunicationError, Communicator
from ..membership import before_regrouping, own_norm, rewind

Parts = Callable[[], Iterable[tuple[Any, NamedTensors]]]
"""The averager's states, and the tensors of each."""


class Transaction:
    """Begins and ends the rounds of one strategy.

    Args:
        averager: of the strategy.
        comm: connects the workers.
        parts: returns the averager's states with their tensors.

    Attributes:
        missed: if this worker was healed when the round began, how many of its steps the others had taken.
    """

    def __init__(self, averager: Averager, comm: Communicator, parts: Parts):
        self._averager, self._comm, self._parts, self.missed = averager, comm, parts, 0

    def begin(self) -> bool:
        """Open a round, unless one is open. Returns whether this worker was healed.

        Raises:
            CommunicationError: not enough workers came, or the Lighthouse does not answer.
        """
        comm, healed = self._comm, False
        comm.progressed()
        while comm.is_elastic and not comm.in_round:
            members = comm.form_round()
            before: list[tuple[Any, Any]] = []
            try:
                if members is not None:
                    comm.heal(members)
                    before = [(state, before_regrouping(state)) for state, _ in self._parts()]
                    for state, tensors in self._parts():
                        self._averager.regroup(state, tensors, comm, members.before)
                comm.open_round(members)
                self.missed = comm.finish_healing()
                healed = healed or (members is not None and comm.rank in members.healed)
            except CommunicationError:  # a worker died meanwhile: all that are left regroup again from where they were
                for state, old in before:
                    state.__dict__.update(old.__dict__)  # in place, as the strategy and its record hold the state
                comm.close_round(False)
        return healed

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Context of a round's messages. Without those of a worker that has died, an elastic round goes on to its vote."""
        try:
            yield
        except CommunicationError:
            if not self._comm.is_elastic:
                raise

    def end(self, success: bool) -> bool:
        """Close the round. Returns whether all workers keep its results."""
        if not self._comm.is_elastic:
            return success
        norm = sum(own_norm(state) ** 2 for state, _ in self._parts()) ** 0.5
        return self._comm.close_round(success, norm)


def remember(state: Any, tensors: Iterable[Tensor] = ()) -> Callable[[], None]:
    """Remember an averager's state and tensors; what is returned goes back to them, after a round that was given up."""
    saved, pairs = state.state_dict(), [(t, t.clone()) for t in tensors]

    def go_back() -> None:
        epoch = state.progress.epoch  # it may have begun meanwhile, and stays
        rewind(state, saved)
        state.progress = state.progress._replace(epoch=epoch)
        for t, old in pairs:
            t.copy_(old)

    return go_back
