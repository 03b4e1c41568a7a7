"""One worker's elastic run: as `loop.py`, but workers may come, go and die between any two lines of it.

    1. data and model    the same on every worker, from the seed; the newest checkpoint, if there is one
    2. round             agree on the workers; one that joins is healed: model, optimizer, and the place in the run
    3. step              this worker's batches among the workers of the round. A round that is given up is done again
    4. metrics           a row every few steps, and when workers have changed; after an epoch also a test
    5. checkpoint        after an epoch, every `checkpoint_every` steps, and when the run stops
    6. summary           the test result and the bytes sent

When workers change, the examples of the epoch that nobody has seen are split anew, as after a resume on another number of
workers (`steps.py`). Rows and checkpoints are made between two rounds. If a worker dies meanwhile, they are left out.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any
from warnings import filterwarnings

import torch

from ....algorithm import require
from ....allocator import keep_freed_memory
from ....comm import CommunicationError, Communicator, ElasticCommunicator, LocalWorld
from ....comm.claims import MAX_NUMBER, MAX_ROUNDS
from ....comm.members import Members
from ....kernels import mix_key, set_threads
from ...files import write_json
from ..config import RunConfig
from ..data import Dataset
from ..folder import checkpoint
from ..folder.run_folder import begin
from ..optimize import set_learning_rate
from ..results.callbacks import Callback, called
from ..results.codec_statistics import codec_statistics
from ..results.evaluation import evaluate
from ..results.meter import Meter
from ..shared_errors import same_error_on_all
from ..step.steps import START, Course, Place, Step, course, steps
from ..step.training import Training, prepare
from .interrupt import Interrupted, Interruption
from .loop import check_images, choose_device, summary, watching

OWN_SETTINGS = frozenset(
    [
        *("recipe", "workers", "min_workers", "first_worker", "lighthouse", "elastic", "threads", "device", "compile"),
        *("output", "name", "suffix", "overwrite", "resume", "wandb", "keep", "requeue"),
        *("backend", "interface", "port", "timeout"),
    ]
)
"""Options in which the workers of a run may differ."""


@dataclass
class Progress:
    """Where the run is; a worker that joins gets it from a live one.

    Attributes:
        done: number of committed steps.
        origin: where the workers of the last rounds began.
        size: their number.
        row: the last row of metrics.
        aborted, healings: of the whole run so far.
        row_is_due, test_is_due, save_is_due: what is to be done after the round; local updates have rounds of many steps.
    """

    done: int = 0
    origin: Place = START
    size: int = 1
    row: dict[str, Any] = field(default_factory=dict)
    aborted: int = 0
    healings: int = 0
    row_is_due: bool = False
    test_is_due: bool = False
    save_is_due: bool = False

    def take(self, told: dict[str, Any]) -> None:
        """Take over what another worker told.

        Raises:
            ValueError: it cannot be true; nothing is taken over then.
        """
        counts = [told["done"], told["aborted"], told["healings"], *told["origin"]]
        is_sane = all(type(count) is int and 0 <= count <= MAX_ROUNDS for count in counts)
        flags = [told[name] for name in ("row_is_due", "test_is_due", "save_is_due")]
        require(
            is_sane
            and len(told["origin"]) == len(START)
            and all(type(flag) is bool for flag in flags)
            and type(told["size"]) is int
            and 1 <= told["size"] <= MAX_NUMBER
            and isinstance(told.get("row", {}), dict)
            and told["origin"][0] <= told["done"],
            f"a place in the run that cannot be: step {told['done']!r} of {told['size']!r} workers, from {told['origin']!r}",
        )
        known = {name: value for name, value in told.items() if name in vars(self)}
        vars(self).update(known | {"origin": Place(*told["origin"])})


def run(
    config: RunConfig,
    folder: Path,
    comm: ElasticCommunicator,
    interruption: Interruption,
    callbacks: Sequence[Callback] = (),
    is_restart: bool = False,
) -> None:
    """Train with this configuration, together with all workers of the same Lighthouse, and write to `folder`.

    Args:
        config: of the run.
        folder: of the run; on several machines, each writes its own metrics.
        comm: a new one, which has had no round.
        interruption: signals to this worker.
        callbacks: see `callbacks.Callback`.
        is_restart: whether this worker takes the place of one that died.

    Raises:
        Interrupted: a signal stopped the run; it can continue from its checkpoint.
        SharedError: data, configuration or checkpoint are wrong.
        CommunicationError: there are too few workers, or the Lighthouse is gone.
    """
    torch.set_num_threads(config.threads)
    set_threads(config.threads)
    keep_freed_memory()
    filterwarnings("ignore", r"\w+: a step was not finite", RuntimeWarning)
    with same_error_on_all():
        comm.check_agreement(shared_settings(config))
        data, device = config.data.load(), choose_device(config)
        ahead = course(config, data, config.workers)
        warnings = check_images(config, data, math.ceil(ahead.num_steps / ahead.per_epoch), device)
        training = prepare(config, data, device, comm)
        if comm.number == config.first_worker and not is_restart:
            begin(config, folder)
            for warning in warnings:
                _say(warning)
    torch.manual_seed(mix_key(config.seed, comm.number, 0))
    worker = _Worker(config, folder, comm, data, training, callbacks)
    try:
        stop = worker.train(interruption)
    except CommunicationError:
        if not (folder / "summary.json").exists():
            raise
        return  # the others have finished the run without this worker
    finally:
        worker.close()
    training.strategy.detach()
    if stop:
        raise Interrupted(stop, folder / "checkpoints" / checkpoint.name_of(worker.progress.done))


class _Worker:
    """The state of one worker, and a method for each part of a step."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        comm: ElasticCommunicator,
        data: Dataset,
        training: Training,
        callbacks: Sequence[Callback],
    ):
        self.config, self.folder, self.comm, self.data = config, folder, comm, data
        self.training, self.handle, self.callbacks = training, training.strategy, callbacks
        self.meter = Meter(data, training.strategy, comm)
        self.progress, self.watchers = Progress(), list[Any]()
        self.members: Members | None = None
        self.synchronized: Members | None = None
        self.ahead: Course
        self.upcoming: Iterator[Step]
        self.step: Step | None = None
        loaded = checkpoint.load_latest(folder / "checkpoints", training, self.meter, comm)
        if loaded.step:
            self.progress = Progress(loaded.step, loaded.origin, loaded.workers, loaded.row)
            comm.resume(loaded.step)
        comm.share("run", self._save, self._load)
        if not training.strategy.models_differ:  # else the strategy does it
            comm.share("optimizer", training.optimizer.state_dict, training.optimizer.load_state_dict)
        comm.share("scaler", training.scaler.state_dict, training.scaler.load_state_dict)

    def train(self, interruption: Interruption) -> int:
        """Take all steps; returns the signal that stopped the run, or 0."""
        comm, progress, stop = self.comm, self.progress, 0
        while not stop:
            with same_error_on_all():  # such as another configuration than the others'
                self.handle.begin_round()
            if comm.members is not self.members:
                self._split()
            if progress.done >= self.ahead.num_steps:  # what is left makes no step for this many workers
                comm.close_round(False)
                self._row(is_tested=True, is_last=True)
                break
            if self.step is None:
                self.step = next(self.upcoming)
                if self.step.begins_epoch is not None:
                    self.handle.set_epoch(self.step.begins_epoch)
                    self.training.carried = None
            if self._step(self.step, interruption):
                stop = self._after_step(self.step)
                self.step = None
                if progress.done >= self.ahead.num_steps:
                    break
        if progress.done < self.ahead.num_steps:
            return stop
        if self._writes:
            events = {"healings": progress.healings, "aborted": progress.aborted}
            write_json(
                self.folder / "summary.json",
                summary(self.config, self.data, progress.row, self.training.strategy) | events,
            )
        return 0

    def _after_step(self, step: Step) -> int:
        """Make the row and the checkpoint that are due, once the round is closed; returns the signal that stops the run."""
        config, comm, progress = self.config, self.comm, self.progress
        stop = 0 if comm.in_round else int(comm.notes[:, 0].max())
        every = config.checkpoint_every or sys.maxsize
        progress.save_is_due |= bool(stop) or step.ends_epoch or progress.done % every == 0
        progress.row_is_due |= progress.save_is_due or progress.done % config.log_every == 0
        progress.test_is_due |= step.ends_epoch and round(step.epoch) % config.evaluate_every == 0
        if not comm.in_round and comm.members is not self.synchronized:
            self._synchronize()
        is_last = progress.done >= self.ahead.num_steps
        if comm.in_round and not is_last:
            return 0
        if progress.row_is_due or is_last:
            self._row(progress.test_is_due or is_last, is_last)
        if progress.save_is_due or is_last:
            self._checkpoint()
        progress.row_is_due = progress.test_is_due = progress.save_is_due = False
        return stop

    def close(self) -> None:
        """Close the files of metrics."""
        for watcher in self.watchers:
            watcher.close()
        self.watchers = []

    def _step(self, step: Step, interruption: Interruption) -> bool:
        """Take a step; returns whether it counts: its round was not given up, or is still open, as in local updates."""
        comm, before, aborted = self.comm, self.comm.counts.committed, self.comm.counts.aborted
        rate = self.config.optimizer.learning_rate_at(
            self.ahead.scheduled(step.number - 1), self.ahead.num_scheduled, comm.size
        )
        set_learning_rate(self.training.optimizer, rate)
        comm.note = [float(interruption.received)]
        with self.meter.clock("step"):
            answers = self.training.step(step.batches)
        self.progress.aborted += comm.counts.aborted - aborted
        if comm.counts.committed == before and not comm.in_round:
            return False
        for scores, labels in answers:
            self.meter.add(scores, labels)
        self.progress.done += 1
        return True

    # ---- when workers change ----

    @property
    def _writes(self) -> bool:
        """Whether this worker writes the metrics: the first one alive of those that were started with it."""
        assert self.comm.members is not None
        ours = range(self.config.first_worker, self.config.first_worker + self.config.workers)
        return self.comm.number == min(number for number in self.comm.members.numbers if number in ours)

    def _split(self) -> None:
        """Split what is left of the epoch over the workers of this round."""
        progress, comm = self.progress, self.comm
        if progress.done:
            progress.origin = course(self.config, self.data, progress.size, progress.origin).place(progress.done)
        progress.size = comm.size
        self.ahead = course(self.config, self.data, comm.size, progress.origin)
        self.upcoming = steps(self.config, self.data, comm, progress.done, self.meter.clock, progress.origin)
        self.step, self.training.carried, self.members = None, None, comm.members

    def _synchronize(self) -> None:
        """After the first round of these workers: agree on the place in the run.

        In local updates, workers may change in the middle of a step, and one that joins takes other steps than the others.
        """
        members, progress = self.comm.members, self.progress
        assert members is not None
        own = {name: value for name, value in vars(progress).items() if name != "row"}
        told = self.comm.between_rounds(lambda: self.comm.gather_objects(own | {"origin": list(progress.origin)}))
        if told is None:
            return
        agreed = told[members.source or 0]
        progress.take(agreed | {"row_is_due": True})
        progress.healings += len(members.healed) if members.version.committed else 0
        self._split()
        self.close()
        if number_that_tells(members) == self.comm.number:
            self._tell(members)
        if self._writes:
            self.watchers = watching(
                self.config, self.folder, self.ahead.num_steps, self.data.best_metric, progress.done - 1
            )
        self.synchronized = members

    def _tell(self, members: Members) -> None:
        """Say on stderr who has left, with what is lost, and who was healed."""
        last = () if self.synchronized is None else self.synchronized.numbers
        for loss in self.comm.counts.losses:
            if loss.round == members.version.committed and loss.worker in last:
                norm = "never voted" if loss.norm is None else f"memory of norm {loss.norm:.3g} is lost"
                _say(
                    f"worker {loss.worker} is gone after step {self.progress.done}: {norm}; {members_text(members)} go on"
                )
        if members.version.committed and members.healed:
            healed = ", ".join(str(members.numbers[rank]) for rank in members.healed)
            _say(f"healed after step {self.progress.done}: worker {healed}; {members_text(members)} go on")

    def _save(self) -> dict[str, Any]:
        progress, meter = self.progress, self.meter.state_dict()
        meter["num_skipped"] = torch.tensor(meter["num_skipped"]).item()
        return vars(progress) | {"origin": list(progress.origin), "meter": meter}

    def _load(self, saved: dict[str, Any]) -> None:
        self.progress.take(saved)
        own = 0 if self.training.strategy.models_differ else saved["meter"]["num_skipped"] - self.handle.num_skipped
        empty = {"sums": torch.zeros_like(saved["meter"]["sums"]), "num_examples": 0, "num_skipped": own}
        self.meter.load_state_dict(saved["meter"] | empty)

    # ---- between two rounds ----

    def _row(self, is_tested: bool, is_last: bool) -> None:
        """Make a row of metrics, together with the others; alone if they die meanwhile and the row is the last."""
        row = self.comm.between_rounds(partial(self._collected, is_tested, self.comm))
        if row is None and is_last:
            row = LocalWorld(1).run(partial(self._collected, is_tested))[0]
        if row is None:
            return
        self.progress.row = row
        for watcher in self.watchers:
            watcher.row(row)

    def _collected(self, is_tested: bool, comm: Communicator) -> dict[str, Any]:
        progress, rate = self.progress, self.training.optimizer.param_groups[0]["lr"]
        row: dict[str, Any] = {
            "step": progress.done,
            "epoch": self.ahead.passes(progress.done),
            "learning_rate": float(rate),
        }
        row |= self.meter.row(comm) | codec_statistics(self.training.strategy)
        row |= {"workers": self.comm.size, "committed": self.comm.counts.committed}
        row |= {"aborted": progress.aborted, "healings": progress.healings}
        if is_tested:
            row |= evaluate(self.config, self.data, self.training.model, self.training.strategy, comm)
        return row | called(self.callbacks, self.training.model, row, comm)

    def _checkpoint(self) -> None:
        self.training.strategy.settle()
        self.comm.between_rounds(self._save_checkpoint)

    def _save_checkpoint(self) -> None:
        progress, comm = self.progress, self.comm
        folder = Path(comm.gather_objects(str(self.folder.absolute()))[0]) / "checkpoints"
        checkpoint.save(folder, progress.done, self.training, self.meter, progress.row, comm, progress.origin)
        if comm.rank == 0:
            checkpoint.tidy(folder, progress.done, self.config, self.data.best_metric)


def shared_settings(config: RunConfig) -> dict[str, Any]:
    """What all workers of an elastic run must have in common, by the names of the options.

    Example:
        >>> shared_settings(RunConfig("digits"))["batch_size"]
        32
    """
    settings = {name: value for name, value in config.as_dict().items() if name not in OWN_SETTINGS}
    places = [item.name for item in fields(config.data) if isinstance(getattr(config.data, item.name), Path)]
    return settings | {"data": {name: value for name, value in settings["data"].items() if name not in places}}


def number_that_tells(members: Members) -> int:
    """The number of a worker that knows what was before: one that was not healed."""
    return members.numbers[members.source or 0]


def members_text(members: Members) -> str:
    """The workers of a round, in words.

    Example:
        >>> members_text(Members((0, 2), (None, None)))
        '2 workers (0, 2)'
    """
    numbers = ", ".join(map(str, members.numbers))
    return f"{len(members.numbers)} workers ({numbers})"


def _say(text: str) -> None:
    print(f"thinwire: {text}", file=sys.stderr, flush=True)
