"""The workers of a run: a fixed number, or those of elastic rounds, which may come, go and die between two steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from ....comm import Communicator, ElasticCommunicator
from ....comm.members import Members
from ....messages import log
from ....strategy import AveragerAttachment
from ...fields import OF_CONNECTIONS, OF_THE_FOLDER
from ..config import RunConfig
from ..shared_errors import same_error_on_all
from .interrupt import Interruption
from .state import RunState

Result = TypeVar("Result")

OWN_SETTINGS = {*OF_THE_FOLDER, *OF_CONNECTIONS, "recipe", "workers", "threads", "device", "compile"}
"""Options in which the workers of an elastic run may differ."""


class Workers:
    """The workers of a run. Where their number is fixed, the whole run is one round, which begins once and is never given up.

    Args:
        config: of the run.
        comm: connects the workers. An elastic one must be new, without a round.
        is_restart: whether this worker replaces one of an elastic run that died.
        keeps_folder: whether this worker is the first of those that share the run's folder; None if worker 0 is, or of an
            elastic run.

    Attributes:
        comm: connects the workers for metrics, tests and checkpoints.
        elastic: the same, if workers may come, go and die between two steps; else None.
        number: of this worker, which no other worker has.
        is_first: whether this worker says what the run warns of.
        keeps_folder: whether this worker begins the run's folder, and writes there what workers have in common.
        started: the numbers of the workers that were started with this one, itself among them.
        begins_anew: whether checkpoints in the folder may still be those of a run that this one replaces: elastic workers do
            not wait for the first one to empty it.
    """

    def __init__(self, config: RunConfig, comm: Communicator, is_restart: bool, keeps_folder: bool | None):
        self.comm, self.elastic = comm, comm if isinstance(comm, ElasticCommunicator) else None
        self._has_begun = False
        self._members: Members | None = None
        self._synchronized: Members | None = None
        self.number, self.is_first, self.started, self.begins_anew = comm.rank, comm.rank == 0, range(comm.size), False
        self.keeps_folder = self.is_first if keeps_folder is None else keeps_folder
        if self.elastic is not None:
            self.number = self.elastic.number
            self.is_first = self.number == config.first_worker and not is_restart
            self.keeps_folder = self.is_first
            self.begins_anew = config.overwrite and not is_restart
            self.started = range(config.first_worker, config.first_worker + config.workers)
            comm.check_agreement(shared_settings(config))

    @property
    def shows(self) -> bool:
        """Whether this worker shows the progress: one of the run, or in elastic runs one of those started together."""
        return self.is_first if self.elastic is None else self.writes

    @property
    def writes(self) -> bool:
        """Whether this worker writes metrics and summary: the first one of a folder, or in elastic runs the first one alive of
        those started with it."""
        if self.elastic is None:
            return self.keeps_folder
        assert self.elastic.members is not None
        return self.number == min(number for number in self.elastic.members.numbers if number in self.started)

    @property
    def in_round(self) -> bool:
        """Whether a round of several steps is open, so that rows and checkpoints must wait."""
        return self.elastic is not None and self.elastic.in_round

    def begin_round(self, strategy: AveragerAttachment) -> bool:
        """Agree on the workers of the next step. Returns whether they are others than before."""
        if self.elastic is None:
            is_first, self._has_begun = not self._has_begun, True
            return is_first
        with same_error_on_all():  # such as another configuration than that of the others
            strategy.begin_round()
        are_new, self._members = self.elastic.members is not self._members, self.elastic.members
        return are_new

    def step(self, take: Callable[[], Result], state: RunState, interruption: Interruption) -> Result | None:
        """Return `take()`, which takes a step; None if its round was given up."""
        if self.elastic is None:
            return take()
        counts, committed, aborted = self.elastic.counts, self.elastic.counts.committed, self.elastic.counts.aborted
        # It travels with the vote of the round, so that all stop after the same step.
        self.elastic.note = float(interruption.received)
        result = take()
        state.aborted += counts.aborted - aborted
        return None if counts.committed == committed and not self.elastic.in_round else result

    def stop_signal(self, interruption: Interruption, wait: bool, row_is_due: bool) -> int:
        """The signal that any worker has received, or 0.

        Args:
            interruption: of this worker.
            wait: whether to wait for the slowest worker, because the strategy has no rounds.
            row_is_due: whether this step ends with a row.
        """
        if self.elastic is not None:
            return 0 if self.in_round else int(self.elastic.notes.max())
        # Workers without rounds have nothing in common but their rows.
        return interruption.requested(self.comm, at_once=wait) if row_is_due or not wait else 0

    def synchronize(self, state: RunState) -> bool:
        """Agree on the run's state after the first round of these workers. Returns whether a new agreement was reached.

        With local updates, workers may change within a step, and one that joins takes other steps than the others.
        """
        members = None if self.elastic is None else self.elastic.members
        if members is None or self.in_round or members is self._synchronized:
            return False
        own = {name: value for name, value in vars(state).items() if name != "row"}
        sent = self.between_rounds(lambda: self.comm.gather_objects(own))
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
        assert self.elastic is not None
        last = () if self._synchronized is None else self._synchronized.numbers
        for loss in self.elastic.counts.losses:
            if loss.round == members.version.committed and loss.worker in last:
                norm = "never voted" if loss.norm is None else f"memory of norm {loss.norm:.3g} is lost"
                log.warning(f"worker {loss.worker} is gone after step {done}: {norm}; {members_text(members)} go on")
        if members.version.committed and members.healed:
            healed = ", ".join(str(members.numbers[rank]) for rank in members.healed)
            log.info(f"healed after step {done}: worker {healed}; {members_text(members)} go on")

    def between_rounds(self, do: Callable[[], Result]) -> Result | None:
        """Return `do()`, which communicates; None if a worker died meanwhile."""
        return do() if self.elastic is None else self.elastic.between_rounds(do)

    def row_values(self, state: RunState) -> dict[str, int]:
        """The values of a row of metrics about workers that came and went."""
        if self.elastic is None:
            return {}
        committed = self.elastic.counts.committed
        return {"workers": self.comm.size, "committed": committed, "aborted": state.aborted, "healings": state.healings}


def shared_settings(config: RunConfig) -> dict[str, Any]:
    """The options that all workers of an elastic run must have in common, by name.

    Example:
        >>> shared_settings(RunConfig("digits"))["batch_size"]
        32
    """
    settings = {name: value for name, value in config.as_dict().items() if name not in OWN_SETTINGS}
    data: Any = config.data  # a dataclass
    paths = [item.name for item in fields(data) if isinstance(getattr(data, item.name), Path)]
    return settings | {"data": {name: value for name, value in settings["data"].items() if name not in paths}}


def members_text(members: Members) -> str:
    """The workers of a round, in words.

    Example:
        >>> members_text(Members((0, 2), (None, None)))
        '2 workers (0, 2)'
    """
    return f"{len(members.numbers)} worker{'s' * (len(members.numbers) > 1)} ({', '.join(map(str, members.numbers))})"
