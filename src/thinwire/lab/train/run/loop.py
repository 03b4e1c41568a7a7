"""One worker's run, from the first weight to the summary.

    1. data and model    the same on every worker, from the seed; the newest checkpoint, if there is one
    2. round             agree on the workers (`workers.py`); with a fixed number of them, once
    3. step              batches (`steps.py`); forward, backward, clip, optimizer (`training.py`)
    4. metrics           a row every few steps (`meter.py`); after an epoch also a test (`evaluation.py`)
    5. checkpoint        after an epoch, every `checkpoint_every` steps, and when the run stops (`checkpoint.py`)
    6. summary           the test result and the bytes sent

With a quorum, workers take unequal numbers of steps (`commits.py`), each as many blocks of data as it is fast (`blocks.py`). A
step of the run is then one of all workers together whose changes are committed. Rows begin where workers merge the round that
completes such a step; no worker waits for the others there. All meet at the end of an epoch, at checkpoints and at the end.

If the folder has a checkpoint, the run continues from the last one: with the same bits as if it had never stopped, or with
another number of workers. All workers run this code. One of them also shows the progress, and the first one of each folder
writes the files. With a fixed number of workers, metrics use a communicator of their own, so that the ledger counts only the
training.

In an elastic run, workers may come, go and die between any two lines. One that joins is healed: it gets model, optimizer and
position from a live worker. Blocks of data are assigned so that each is committed once (`blocks.py`); those of a round that is
given up are assigned again. Rows and checkpoints are made between two rounds. If a worker dies meanwhile, they are left out.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast
from warnings import filterwarnings

import torch
from torch import Tensor

from ....allocator import keep_freed_memory
from ....comm import CommunicationError, Communicator, ElasticCommunicator, LocalWorld
from ....kernels import mix_key, set_threads
from ....messages import log
from ....strategy import LocalUpdates
from ...files import write_json
from ..config import RunConfig
from ..data import Dataset, load
from ..device import choose_device
from ..folder import checkpoint
from ..folder.run_folder import begin
from ..results.callbacks import Callback, EachStep, called
from ..results.codec_statistics import codec_statistics, has_variance, own_gradients
from ..results.evaluation import evaluate, models_apart
from ..results.meter import Meter
from ..results.metrics_files import MetricsWriter
from ..results.summary import summary
from ..results.terminal import Terminal
from ..results.trackers import Tracker, trackers
from ..shared_errors import run_on_all, same_error_on_all
from ..step.blocks import BlockCourse, BlockSteps
from ..step.image_sizes import check_image_sizes
from ..step.steps import START, Course, Step, course, steps
from ..step.training import Training, prepare
from .check import check_first
from .commits import Commits
from .interrupt import Interrupted, Interruption
from .layout import LAYOUT_FILE, layout_of_run
from .state import RunState
from .workers import Workers

Result = TypeVar("Result")


def run(
    config: RunConfig,
    folder: Path,
    comm: Communicator,
    interruption: Interruption,
    callbacks: Sequence[Callback] = (),
    is_restart: bool = False,
    keeps_folder: bool | None = None,
) -> None:
    """Train with this configuration and write the results to `folder`; all workers call this together.

    Args:
        config: of the run.
        folder: of the run. Machines may share it, or have one each. In an elastic run, each machine writes its own metrics.
        comm: connects the workers. An elastic one must be new, without a round.
        interruption: signals to this worker.
        callbacks: see `callbacks.Callback`.
        is_restart: whether this worker replaces one of an elastic run that died.
        keeps_folder: whether this worker is the first of those that share the folder; None if worker 0 is, or if elastic.

    Raises:
        Interrupted: a signal stopped the run; it can continue from its checkpoint.
        SharedError: on all workers, if data, configuration or checkpoint are wrong.
        CommunicationError: too few workers are left.
    """
    torch.set_num_threads(config.threads)
    set_threads(config.threads)
    keep_freed_memory()
    filterwarnings("ignore", r"\w+: a step was not finite", RuntimeWarning)  # `Terminal` warns for all workers
    workers = Workers(config, comm, is_restart, keeps_folder)
    check_first(config, comm)
    data = run_on_all(comm, lambda: load(config.data))
    # Before its first round an elastic communicator connects one worker, itself.
    whole = run_on_all(comm, lambda: course(config, data, config.workers if comm.is_elastic else comm.size))
    device = run_on_all(comm, lambda: choose_device(config))
    layout = layout_of_run(config, folder, comm) if config.measure_lines else None
    with same_error_on_all():
        comm.check_agreement({"training data": data.digest()})
        train, test = data.image_shapes(math.ceil(whole.num_steps / whole.per_epoch))
        bf16_on_cpu = device.type == "cpu" and config.precision == "bf16"
        warnings = check_image_sizes(config.model, data.num_classes, train, test, bf16_on_cpu)
        training = prepare(config, data, device, workers.elastic, comm, layout)
    if config.variance and not has_variance(training.strategy):
        why = f"{config.strategy} does not average gradients by a lossy codec without a vote, such as QSGD(bits=4)"
        warnings.append(f"--variance records nothing: {why}")
    run_on_all(comm, lambda: begin(config, folder) if workers.keeps_folder else None)
    if layout is not None and workers.is_first:
        write_json(folder / LAYOUT_FILE, asdict(layout))
    for warning in warnings if workers.is_first else []:
        log.warning(warning)
    torch.manual_seed(mix_key(config.seed, workers.number, 0))  # from here on workers draw different numbers (dropout)
    worker = _Worker(config, folder, workers, data, training, callbacks)
    try:
        stop = worker.train(interruption)
    except CommunicationError:
        if not (comm.is_elastic and (folder / "summary.json").exists()):
            raise
        return  # the others have finished the run without this worker
    finally:
        worker.close()
    training.detach()
    if stop:
        raise Interrupted(stop, worker.checkpoints / checkpoint.name_of(worker.state.done))


class _Worker:
    """The state of one worker, and a method for each part of a step."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        workers: Workers,
        data: Dataset,
        training: Training,
        callbacks: Sequence[Callback],
    ):
        self.config, self.folder, self.workers, self.data = config, folder, workers, data
        self.training, self.strategy, self.checkpoints = training, training.strategy, folder / "checkpoints"
        self.at_rows = [callback for callback in callbacks if not isinstance(callback, EachStep)]
        self.at_steps = [callback for callback in callbacks if isinstance(callback, EachStep)]
        others = None if workers.elastic is not None else workers.comm.ledger
        self.meter = Meter(data, training.strategy, training.virtual, others)
        self.watchers: list[Any] = []
        self.trackers: list[Tracker] = []
        self.gradients: dict[str, Tensor] = {}
        self.commits: Commits | None = None
        self.ahead: Course | BlockCourse
        self.upcoming: Iterator[Step]
        if workers.begins_anew:
            loaded = checkpoint.Loaded(workers.comm.size)
        else:
            loaded = checkpoint.load_latest(
                self.checkpoints, training, self.meter, workers.comm, workers.keeps_folder, workers.started
            )
        self.damaged = loaded.damaged
        self.state = RunState(loaded.step, dict(loaded.row))
        self.is_apart = False  # whether workers' models were found to differ that should be equal
        self.tested_mean: dict[str, Any] | None = None  # the shared state of the test, for the checkpoint after it
        if loaded.workers != workers.comm.size and workers.is_first and not workers.comm.is_elastic:
            text = f"goes on with {workers.comm.size} workers from a checkpoint of {loaded.workers}"
            log.info(f"{text}; their memory is redistributed")
        training.virtual.begin(self.strategy.comm, workers.comm, self.meter.virtual_seconds)
        place = course(config, data, loaded.workers, loaded.origin).place(loaded.step) if loaded.step else START
        self.origin = loaded.origin if loaded.workers == workers.comm.size else place
        self.blocks: BlockSteps | None = None
        if workers.elastic is not None or self.strategy.strategy.counts_commits:
            self.blocks = blocks = BlockSteps(config, data, self.strategy)
            if loaded.step:
                run_on_all(workers.comm, lambda: blocks.load(loaded.position, place))
        if workers.elastic is not None:
            self._share_with_joiners(workers.elastic)
            workers.elastic.load_state_dict(
                {"rounds": loaded.rounds} | ({"digests": loaded.digests} if loaded.digests else {})
            )

    def train(self, interruption: Interruption) -> int:
        """Take all steps; returns the signal that stopped the run, or 0."""
        state, comm, stop, is_complete = self.state, self.workers.comm, 0, False
        while not (stop or is_complete):
            with interruption.waiting():
                are_new = self.workers.begin_round(self.strategy)
            if are_new:
                self._report_damage()
                self._split()
                if not comm.is_elastic:
                    run_on_all(comm, partial(self._open, state.done))
            if state.done >= self.ahead.num_steps:  # what is left makes no step for this many workers
                self._test_only()
                break
            step = next(self.upcoming) if self.blocks is None else self.blocks.take(state.done, comm, self.meter.clock)
            if step is None:
                stop, is_complete = self._wait_for_others(interruption), state.done >= self.ahead.num_steps
                continue
            if step.begins_epoch is not None:
                self.strategy.set_epoch(step.begins_epoch)
                self.training.carried = None
            # Of a round that was given up, the blocks are assigned again.
            if self._step(step, interruption):
                if self.commits is None:
                    stop = self._after_step(step, interruption)
                else:
                    stop = self._after_rounds(interruption) or 0
                is_complete = state.done >= self.ahead.num_steps
        if state.done < self.ahead.num_steps:
            return stop
        if self.workers.writes:
            write_json(self.folder / "summary.json", summary(self.config, self.data, state.row, self.strategy))
        return 0

    def close(self) -> None:
        """Close the files of metrics, and wait until the trackers have sent their rows."""
        for watcher in {*self.watchers, *self.trackers}:
            watcher.close()
        self.watchers, self.trackers = [], []

    def _report_damage(self) -> None:
        """Once the workers of an elastic run know who has the newest state: say what was wrong with own checkpoints."""
        damaged, self.damaged, comm = self.damaged, {}, self.workers.elastic
        if not damaged or comm is None:
            return
        assert comm.members is not None
        if not comm.members.version.committed:  # nobody has a whole one
            raise checkpoint.none_is_whole(self.checkpoints, damaged)
        is_healed = comm.rank in comm.members.healed
        used = "the state of other workers" if is_healed else checkpoint.name_of(self.state.done)
        checkpoint.set_aside(self.checkpoints, damaged, used)

    # ---- one step ----

    def _step(self, step: Step, interruption: Interruption) -> bool:
        """Take a step; returns whether it counts: its round is committed, or still open as with local updates."""
        learning_rate = self.config.optimizer.learning_rate_at(
            self.ahead.scheduled(self.state.done), self.ahead.num_scheduled, self.workers.comm.size
        )
        self.training.learning_rate = learning_rate
        watched = self.config.variance and self.workers.writes and self._row_is_due(step)
        collecting: AbstractContextManager[dict[str, Tensor]] = (
            own_gradients(self.training.model, self.training.scaler.get_scale()) if watched else nullcontext({})
        )
        if self.commits is not None:
            self.commits.count(self.config.batch_size * self.config.accumulate)
        with self.meter.clock("step"), self.training.virtual.step(), collecting as self.gradients:
            weight = 1.0 if self.blocks is None else self.blocks.weight
            answers = self.workers.step(partial(self.training.step, step.batches, weight), self.state, interruption)
        if answers is None:
            return False
        for scores, labels in answers:
            self.meter.add(scores, labels)
        self.state.done += self.commits is None
        if self.at_steps:
            now = {"step": step.number, "epoch": step.epoch, "learning_rate": learning_rate}
            if info := called(self.at_steps, self.training.model, now, self.workers.comm):
                for watcher in self.watchers:
                    watcher.info({"step": step.number} | info)
        return True

    def _row_is_due(self, step: Step) -> bool:
        return step.number % self.config.log_every == 0 or step.ends_epoch

    def _after_step(self, step: Step, interruption: Interruption) -> int:
        """Make the row and the checkpoint that are due, unless a round is open; returns the signal that stops the run."""
        config, state = self.config, self.state
        if self.blocks is not None:
            self.ahead = self.blocks.course(state.done, self.workers.comm.size)
            step = step._replace(epoch=self.ahead.passes(state.done), ends_epoch=self.blocks.epoch_has_ended())
        state.row_is_due |= self._row_is_due(step)
        has_rounds = self.strategy.averager.traits.has_rounds  # workers without rounds synchronise only at rows
        stop = self.workers.stop_signal(interruption, not has_rounds, state.row_is_due)
        every = config.checkpoint_every or self.ahead.num_steps
        state.save_is_due |= bool(stop) or step.ends_epoch or step.number % every == 0
        state.test_is_due |= step.ends_epoch and round(step.epoch) % config.evaluate_every == 0
        if self.workers.synchronize(state):
            self._split()
            self._open(state.done - 1)
        is_last = state.done >= self.ahead.num_steps
        if self.workers.in_round and not is_last:
            return 0
        if state.save_is_due or is_last:
            self.strategy.settle()  # so that the row of a checkpoint counts the bytes of whole rounds
        if state.row_is_due or is_last:
            self._row(state.test_is_due or is_last, is_last)
        if state.save_is_due or is_last:
            self.workers.between_rounds(self._save_checkpoint)
        state.row_is_due = state.test_is_due = state.save_is_due = False
        return stop

    # ---- with a quorum ----

    def _after_rounds(self, interruption: Interruption) -> int | None:
        """Make what is due after each round that this worker has merged.

        Returns:
            The signal that stops the run, 0 for none; None if not all workers have met.
        """
        state, comm, (commits, ahead) = self.state, self.workers.comm, self._counted
        while merged := commits.next(ahead):
            before, state.done = state.done, merged.done
            every = self.config.checkpoint_every or ahead.num_steps
            is_last = state.done >= ahead.num_steps
            all_meet = is_last or merged.ends_epoch or state.done // every > before // every
            if not (all_meet or state.done // self.config.log_every > before // self.config.log_every):
                continue
            stop = interruption.requested(comm)
            if stop or all_meet:
                self._meet()
                return stop
            if begun := self._begun_row():
                self._write_row(begun)
            row = self._row_start()
            commits.row = row, self.meter.begin_row(comm), self._statistics()
        return None

    def _wait_for_others(self, interruption: Interruption) -> int:
        """No block is left for this worker: merge the rounds of others until all meet. Returns the signal."""
        while (stop := self._after_rounds(interruption)) is None:
            if not cast(LocalUpdates, self.strategy).drain():  # blocks of this epoch were given back
                self._meet()
                return 0
        return stop

    @property
    def _counted(self) -> tuple[Commits, BlockCourse]:
        assert self.commits is not None and isinstance(self.ahead, BlockCourse), "only with a quorum"
        return self.commits, self.ahead

    def _begun_row(self) -> dict[str, Any]:
        """The row that was begun last, once all workers have reached it; empty if there is none."""
        commits, _ = self._counted
        begun, commits.row = commits.row, None
        if begun is None:
            return {}
        start, sums, statistics = begun
        return start | sums() | statistics

    def _meet(self) -> None:
        """Synchronize all workers, test at the end of an epoch, and save."""
        state, (commits, ahead), blocks = self.state, self._counted, self.blocks
        assert blocks is not None
        begun = self._begun_row()
        cast(LocalUpdates, self.strategy).synchronize()
        while merged := commits.next(ahead):
            state.done = merged.done
        has_ended, is_last = blocks.epoch_has_ended(), state.done >= ahead.num_steps
        self.ahead = blocks.course(state.done, ahead.size)
        is_tested = is_last or (has_ended and round(blocks.passes) % self.config.evaluate_every == 0)
        if begun and is_tested and begun["step"] == state.done:  # the last round has committed less than a step
            self.meter.continue_row()  # so that the step has one row, with the test
        elif begun:
            self._write_row(begun)
        if is_tested or state.row.get("step") != state.done:
            self._row(is_tested, is_last)
        self._save_checkpoint()

    # ---- when workers change ----

    def _split(self) -> None:
        """Split the unseen examples of the epoch over the workers of this round."""
        done, comm = self.state.done, self.workers.comm
        if self.blocks is None:
            self.ahead = course(self.config, self.data, comm.size, self.origin)
            self.upcoming = steps(self.config, self.data, comm, self.ahead, done, self.meter.clock)
            return
        self.ahead = self.blocks.course(done, comm.size)
        self.training.carried = None  # other workers read other texts
        if self.strategy.strategy.counts_commits:
            self.commits = Commits(cast(LocalUpdates, self.strategy), self.blocks, self.ahead)

    def _open(self, done: int) -> None:
        """Open the receivers of rows, anew, after `done` steps: they have `row(values)`, `info(values)` and `close()`."""
        for watcher in self.watchers:
            if watcher not in self.trackers:
                watcher.close()
        self.watchers = []
        if self.workers.writes:
            self.watchers.append(MetricsWriter(self.folder, done, self.data.metric_names))
        if self.workers.shows:
            config = self.config
            # The loss scaler of fp16 lets gradients overflow to find its scale.
            limit = None if config.precision == "fp16" else config.parsed_strategy().max_nonfinite
            # These stay open: no other worker waits for a server that is gone.
            self.trackers = self.trackers or trackers(config, self.folder)
            terminal = Terminal(self.folder.name, self.ahead.num_steps, self.data.best_metric, done, limit)
            self.watchers += [terminal, *self.trackers]

    def _share_with_joiners(self, comm: ElasticCommunicator) -> None:
        comm.share("run", self._save, self._load, is_common=False)
        training = self.training
        if not self.strategy.models_differ:  # else the strategy does it
            comm.share("optimizer", training.optimizer.state_dict, training.optimizer.load_state_dict)
        scaler, is_common = training.scaler, not self.strategy.models_differ
        comm.share("scaler", scaler.state_dict, scaler.load_state_dict, is_common)

    def _save(self) -> dict[str, Any]:
        meter = self.meter.state_dict()
        meter["num_skipped"] = torch.tensor(meter["num_skipped"]).item()
        return vars(self.state) | {"meter": meter}

    def _load(self, saved: dict[str, Any]) -> None:
        self.state.load(saved)
        own = 0 if self.strategy.models_differ else saved["meter"]["num_skipped"] - self.strategy.num_skipped
        empty = {"sums": torch.zeros_like(saved["meter"]["sums"]), "num_examples": 0, "num_skipped": own}
        self.meter.load_state_dict(saved["meter"] | empty)

    # ---- rows and checkpoints ----

    def _row(self, is_tested: bool, is_last: bool) -> None:
        """Make a row of metrics."""
        self.tested_mean = None
        row = self._together(partial(self._collected, is_tested), is_last)
        if row is None:
            return
        if not row["examples_per_second"]:  # all batches of a quorum were in the row before
            kept = {*self.data.metric_names, "examples_per_second"}
            row |= {name: value for name, value in self.state.row.items() if name in kept}
        self._write_row(row)

    def _write_row(self, row: dict[str, Any]) -> None:
        self.state.row = row
        for watcher in self.watchers:
            watcher.row(row)

    def _together(self, do: Callable[[Communicator], Result], is_last: bool) -> Result | None:
        """The result of all workers. If some die meanwhile: None, or of the last row this worker's own."""
        result = self.workers.between_rounds(partial(do, self.workers.comm))
        if result is None and is_last:
            result = LocalWorld(1).run(do)[0]
            self.tested_mean = None
        return result

    def _collected(self, is_tested: bool, comm: Communicator) -> dict[str, Any]:
        row = self._row_start() | self.meter.row(comm) | self._statistics()
        row |= self._tested(comm) if is_tested else {}
        return row | called(self.at_rows, self.training.model, row, comm)

    def _row_start(self) -> dict[str, Any]:
        done = self.state.done
        return {"step": done, "epoch": self.ahead.passes(done), "learning_rate": self.training.learning_rate}

    def _statistics(self) -> dict[str, Any]:
        found = codec_statistics(self.strategy, self.gradients) | self.workers.row_values(self.state)
        return found if self.commits is None else found | self.commits.row_values()

    def _compare_models(self, comm: Communicator) -> None:
        """Warn once where workers have other parameters although they average gradients; a test is shared out among them."""
        if self.is_apart or self.strategy.models_differ:
            return
        apart = models_apart(self.training.model, comm)
        self.is_apart = apart is not None
        if self.is_apart and comm.rank == 0:
            log.warning(
                f"the workers' models are not equal, although {self.config.strategy} gives all of them the same gradients: "
                f"{apart}; results are of no use, unless that is rounding on unequal machines; check parts of your own with "
                "thinwire.testing"
            )

    def _tested(self, comm: Communicator) -> dict[str, float]:
        self._compare_models(comm)

        def keep() -> None:
            self.tested_mean = copy.deepcopy(self.training.shared_state())

        return evaluate(self.config, self.data, self.training.model, self.strategy, comm, keep)

    def _test_only(self) -> None:
        """Test the model after the last step, unless its row has a test already."""
        state = self.state
        if self.workers.in_round:
            self.workers.comm.close_round(False)
        if state.row.get("step") != state.done:
            self._row(is_tested=True, is_last=True)
        elif f"test_{self.data.best_metric}" not in state.row:
            state.row |= self._together(self._tested, is_last=True) or {}

    def _save_checkpoint(self) -> None:
        comm, step, folder = self.workers.comm, self.state.done, self.checkpoints
        position, origin = None, self.origin
        if self.blocks is not None:
            position, origin = self.blocks.sampler.state_dict(), self.blocks.place(step)
        is_first_here = checkpoint.save(
            folder,
            step,
            self.training,
            self.meter,
            self.state.row,
            comm,
            self.workers.keeps_folder,
            origin,
            position,
            self.tested_mean,
        )
        self.tested_mean = None
        if not comm.is_elastic:
            comm.barrier()  # all folders have this checkpoint before one loses an older one
        if is_first_here:
            metric = self.data.best_metric
            checkpoint.tidy(folder, step, self.config, metric, metric in self.data.lower_is_better)
