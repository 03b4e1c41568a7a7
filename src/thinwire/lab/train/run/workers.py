"""The workers of a run: a fixed number, or those of elastic rounds, which may come, go and die between two steps."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from ....comm import Communicator, ElasticCommunicator
from ....comm.members import Members
from ....strategy import AveragerAttachment
from ..config import RunConfig
from ..shared_errors import same_error_on_all
from .interrupt import Interruption
from .state import RunState

log = logging.getLogger("thinwire")

Result = TypeVar("Result")

OWN_SETTINGS = frozenset(
    [
        *("recipe", "workers", "min_workers", "first_worker", "lighthouse", "elastic", "threads", "device", "compile"),
        *("output", "name", "suffix", "overwrite", "resume", "wandb", "mlflow", "keep", "requeue"),
        *("transport", "interface", "credentials", "no_listen", "relay", "port", "timeout"),
    ]
)
"""Options in which the workers of an elastic run may differ."""


class Workers(ABC):
    """What the training loop asks about the workers of its run.

    Attributes:
        comm: connects the workers for metrics, tests and checkpoints.
        number: of this worker, which no other worker has.
        is_first: whether this worker begins the run's folder.
        started: the numbers of the workers that were started with this one, itself among them.
        begins_anew: whether checkpoints in the folder may still be those of a run that this one replaces: elastic workers do
            not wait for the first one to empty it.
    """

    comm: Communicator
    number: int
    is_first: bool
    started: Sequence[int]
    begins_anew: bool

    @property
    @abstractmethod
    def writes(self) -> bool:
        """Whether this worker shows the progress and writes the metrics."""

    @property
    @abstractmethod
    def in_round(self) -> bool:
        """Whether a round of several steps is open, so that rows and checkpoints must wait."""

    @abstractmethod
    def begin_round(self, strategy: AveragerAttachment) -> bool:
        """Agree on the workers of the next step. Returns whether they are others than before."""

    @abstractmethod
    def step(self, take: Callable[[], Result], state: RunState, interruption: Interruption) -> Result | None:
        """Return `take()`, which takes a step; None if its round was given up."""

    @abstractmethod
    def stop_signal(self, interruption: Interruption, wait: bool, row_is_due: bool) -> int:
        """The signal that any worker has received, or 0.

        Args:
            interruption: of this worker.
            wait: whether to wait for the slowest worker, because the strategy has no rounds.
            row_is_due: whether this step ends with a row.
        """

    @abstractmethod
    def synchronize(self, state: RunState) -> bool:
        """Agree on the run's state after the first round of these workers. Returns whether a new agreement was reached."""

    @abstractmethod
    def between_rounds(self, do: Callable[[], Result]) -> Result | None:
        """Return `do()`, which communicates; None if a worker died meanwhile."""

    @abstractmethod
    def row_values(self, state: RunState) -> dict[str, int]:
        """The values of a row of metrics about workers that came and went."""


class FixedWorkers(Workers):
    """The same workers from the first step to the last."""

    in_round: ClassVar[bool] = False

    def __init__(self, comm: Communicator):
        self.comm, self.number, self.is_first, self.started = comm, comm.rank, comm.rank == 0, range(comm.size)
        self._has_begun, self.begins_anew = False, False

    @property
    def writes(self) -> bool:
        return self.is_first

    def begin_round(self, strategy: AveragerAttachment) -> bool:
        is_new, self._has_begun = not self._has_begun, True
        return is_new

    def step(self, take: Callable[[], Result], state: RunState, interruption: Interruption) -> Result | None:
        return take()

    def stop_signal(self, interruption: Interruption, wait: bool, row_is_due: bool) -> int:
        return interruption.requested(self.comm, at_once=wait) if row_is_due or not wait else 0

    def synchronize(self, state: RunState) -> bool:
        return False

    def between_rounds(self, do: Callable[[], Result]) -> Result | None:
        return do()

    def row_values(self, state: RunState) -> dict[str, int]:
        return {}


class ElasticWorkers(Workers):
    """Workers that may come, go and die between two steps.

    Args:
        config: of the run.
        comm: a new one, which has had no round.
        is_restart: whether this worker replaces one that died.
    """

    comm: ElasticCommunicator

    def __init__(self, config: RunConfig, comm: ElasticCommunicator, is_restart: bool):
        self.comm, self.number = comm, comm.number
        self.is_first = comm.number == config.first_worker and not is_restart
        self.begins_anew = config.overwrite and not is_restart
        self.started = range(config.first_worker, config.first_worker + config.workers)
        self._members: Members | None = None
        self._synchronized: Members | None = None
        comm.check_agreement(shared_settings(config))

    @property
    def writes(self) -> bool:
        """The first one alive of those that were started with this worker."""
        assert self.comm.members is not None
        return self.number == min(number for number in self.comm.members.numbers if number in self.started)

    @property
    def in_round(self) -> bool:
        return self.comm.in_round

    def begin_round(self, strategy: AveragerAttachment) -> bool:
        with same_error_on_all():  # such as another configuration than that of the others
            strategy.begin_round()
        are_new, self._members = self.comm.members is not self._members, self.comm.members
        return are_new

    def step(self, take: Callable[[], Result], state: RunState, interruption: Interruption) -> Result | None:
        counts, committed, aborted = self.comm.counts, self.comm.counts.committed, self.comm.counts.aborted
        self.comm.note = float(interruption.received)
        result = take()
        state.aborted += counts.aborted - aborted
        return None if counts.committed == committed and not self.comm.in_round else result

    def stop_signal(self, interruption: Interruption, wait: bool, row_is_due: bool) -> int:
        return 0 if self.comm.in_round else int(self.comm.notes.max())

    def synchronize(self, state: RunState) -> bool:
        """With local updates, workers may change within a step, and one that joins takes other steps than the others."""
        members = self.comm.members
        assert members is not None
        if self.comm.in_round or members is self._synchronized:
            return False
        own = {name: value for name, value in state.as_dict().items() if name != "row"}
        sent = self.comm.between_rounds(lambda: self.comm.gather_objects(own))
        if sent is None:
            return False
        state.load(sent[members.source or 0] | {"row_is_due": True})
        state.healings += len(members.healed) if members.version.committed else 0
        if self.number == members.numbers[members.source or 0]:  # it was not healed, and knows who was there before
            self._report(members, state.done)
        self._synchronized = members
        return True

    def _report(self, members: Members, done: int) -> None:
        """Say on stderr who has left, with what is lost, and who was healed."""
        last = () if self._synchronized is None else self._synchronized.numbers
        for loss in self.comm.counts.losses:
            if loss.round == members.version.committed and loss.worker in last:
                norm = "never voted" if loss.norm is None else f"memory of norm {loss.norm:.3g} is lost"
                log.warning(f"worker {loss.worker} is gone after step {done}: {norm}; {members_text(members)} go on")
        if members.version.committed and members.healed:
            healed = ", ".join(str(members.numbers[rank]) for rank in members.healed)
            log.info(f"healed after step {done}: worker {healed}; {members_text(members)} go on")

    def between_rounds(self, do: Callable[[], Result]) -> Result | None:
        return self.comm.between_rounds(do)

    def row_values(self, state: RunState) -> dict[str, int]:
        committed = self.comm.counts.committed
        return {"workers": self.comm.size, "committed": committed, "aborted": state.aborted, "healings": state.healings}


def shared_settings(config: RunConfig) -> dict[str, Any]:
    """The options that all workers of an elastic run must have in common, by name.

    Example:
        >>> shared_settings(RunConfig("digits"))["batch_size"]
        32
    """
    settings = {name: value for name, value in config.as_dict().items() if name not in OWN_SETTINGS}
    paths = [item.name for item in fields(config.data) if isinstance(getattr(config.data, item.name), Path)]
    return settings | {"data": {name: value for name, value in settings["data"].items() if name not in paths}}


def members_text(members: Members) -> str:
    """The workers of a round, in words.

    Example:
        >>> members_text(Members((0, 2), (None, None)))
        '2 workers (0, 2)'
    """
    return f"{len(members.numbers)} workers ({', '.join(map(str, members.numbers))})"
