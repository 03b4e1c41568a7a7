"""Transformers: a callback for its Trainer. Needs the packages `transformers` and `accelerate`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..algorithm import require
from ..attaching import attach
from ..comm import ProcessGroupCommunicator
from ..messages import error_text
from ..strategy import AveragerAttachment
from ..strategy.strategy import Averaging
from . import averaging, elastic_of, is_alone, trainer_package
from .elastic import ElasticState
from .numbers import numbers, summary
from .state import WorkerState, num_workers

with trainer_package("transformers"):
    from transformers import ProgressCallback, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class AttachStrategy(TrainerCallback):
    """Sets a strategy to work in a `Trainer` on several processes.

    The callback attaches when training begins, and tells schedules the epoch. It adds bytes, savings and waiting time to the
    trainer's log, and shows them in its progress bar. It saves each worker's state beside the trainer's checkpoint, in
    `checkpoint-N/thinwire-rankR.pt`. With one process there is nothing to average, and the callback does nothing.

    Where each worker has a model of its own, the trainer evaluates and saves the mean of all workers, and ends with it. The
    states of a worker's model and optimizer are in its own file, so that a resumed run goes on bit for bit. Another number of
    workers needs a folder that all can read; `Local` then begins with the model of its last round, others with the mean.

    With an `ElasticCommunicator` as `comm` each worker is a process with an output folder of its own, started by no launcher. A
    round begins with each step. A worker that joins takes over the step and the learning-rate schedule of the others too, so
    that all end at the same `max_steps`. Each evaluates and saves its own model, and goes on from its own checkpoint.

    Args:
        trainer: the trainer to attach to; it must not be training yet.
        strategy: such as `Local(Mean(QSGD(bits=4)), every=30, outer=OuterSGD())`, or its notation.
        resume_from: folder of the checkpoint that training continues; by default `checkpoint-N` in the output folder,
            where N is the step at which the trainer resumes.
        options: further arguments of `thinwire.attach`, such as `comm`.

    Raises:
        ValueError: the strategy cannot be read or has a quorum; when training begins, it does not suit the model, or a resumed
            checkpoint lacks the state of any worker, or `comm` connects other processes than the trainer's.

    Example:
        >>> from thinwire.integrations.transformers import AttachStrategy
        >>> # trainer = transformers.Trainer(model, args, train_dataset=data)
        >>> # AttachStrategy(trainer, tw.Gradients(tw.Mean(tw.QSGD(bits=4))))
        >>> # trainer.train()
    """

    def __init__(
        self,
        trainer: Trainer,
        strategy: Averaging[Any] | str,
        *,
        resume_from: str | Path | None = None,
        **options: Any,
    ):
        self._trainer, self._strategy, self._options = trainer, averaging(strategy, together=True), options
        self._resume_from = resume_from
        self._elastic = elastic_of(options)
        self.handle: AveragerAttachment | None = None
        self._state: WorkerState | ElasticState | None = None  # while the strategy is attached
        if self._strategy.models_differ:
            # With FSDP the optimizer's method saves the shards of the model too.
            also = ("_save_optimizer_and_scheduler",) if trainer.is_fsdp_enabled else ()
            on_mean = ("evaluate", "predict", "save_model", *also) if self._elastic is None else ()
            wraps = dict.fromkeys(on_mean, self._on_mean) | {"_load_best_model": self._once_detached}
            for name, wrap in wraps.items():
                setattr(trainer, name, wrap(getattr(trainer, name)))
        trainer.callback_handler.callbacks.insert(0, self)  # before those that report what `on_log` adds

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach to the model, which the trainer has wrapped by now, and restore this worker's state."""
        if self._elastic is None and is_alone(args.world_size, self._options):
            return
        self._detach()  # if the training before ended with an error
        resumes, folder = state.global_step > 0, Path(self._resume_from or self._folder(args, state))
        saved = _read(folder, args.process_index, args.world_size) if resumes else None
        model, optimizer = self._trainer.model_wrapped, self._trainer.optimizer
        scaler = self._trainer.accelerator.scaler
        assert optimizer is not None, "the trainer makes its optimizer before on_train_begin"
        self.handle = attach(model, optimizer, self._strategy, scaler=scaler, **self._options)
        if self._elastic is None:
            self._state = WorkerState(self.handle, model, [optimizer])
        else:
            scheduler = self._trainer.lr_scheduler
            assert scheduler is not None, "the trainer makes its schedule before on_train_begin"
            steps, set_steps = partial(getattr, state, "global_step"), partial(setattr, state, "global_step")
            schedulers = [scheduler]
            self._state = ElasticState(
                self.handle, self._elastic, [optimizer], schedulers, schedulers, steps, set_steps
            )
        if saved is not None:
            self._state.load_state_dict(saved)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin a round of an elastic run, and count the steps that a worker which joins leaves out."""
        if isinstance(self._state, ElasticState):
            self._state.begin_step()

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Tell schedules that count epochs."""
        if self.handle is not None:
            self.handle.set_epoch(int(state.epoch or 0))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add this worker's bytes and waiting time to the row that is being logged, and to the progress bar."""
        if self.handle is not None:
            values = numbers(self.handle)
            # The trainer has added a copy of `logs` to its history already.
            state.log_history[-1].update(values)
            if logs is not None:
                logs.update(values)
            for callback in self._trainer.callback_handler.callbacks:
                bar: Any = callback.training_bar if isinstance(callback, ProgressCallback) else None
                if bar is not None:
                    bar.set_postfix_str(summary(self.handle))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Save this worker's state beside the trainer's checkpoint."""
        if self._state is None:
            return
        folder = self._folder(args, state)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(self._state.state_dict(), _file(folder, args.process_index))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop averaging; models that differ become their mean."""
        self._detach()

    def _detach(self) -> None:
        self._state = None
        if self.handle is not None:
            self.handle.detach()

    def _once_detached(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same method of the trainer, once averaging has ended: what is in flight would change the model it loads."""

        @functools.wraps(call)
        def once_detached(*args: Any, **kwargs: Any) -> Any:
            self._detach()
            return call(*args, **kwargs)

        return once_detached

    def _on_mean(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same method of the trainer, with the mean of all workers as the model."""

        @functools.wraps(call)
        def on_mean(*args: Any, **kwargs: Any) -> Any:
            attached = None if self._state is None else self.handle
            with nullcontext() if attached is None else attached.average_model():
                return call(*args, **kwargs)

        return on_mean

    @staticmethod
    def _folder(args: TrainingArguments, state: TrainerState) -> Path:
        """The trainer's checkpoint folder at this step."""
        assert args.output_dir is not None, "TrainingArguments fills in its default"
        return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _file(folder: Path, rank: int) -> Path:
    return folder / f"thinwire-rank{rank}.pt"


def _read(folder: Path, rank: int, size: int) -> dict[str, Any]:
    """The state that this worker saved, or those of all workers if there were more or fewer.

    All workers call it together, and all raise the error of any.
    """
    saved: dict[str, Any] = {}
    mistake, path = None, _file(folder, rank)
    try:
        # A worker that is new has no file.
        saved = _load(path if path.exists() else _file(folder, 0))
        before = num_workers(saved)
        needed = [rank] if size in (1, before) else range(before)  # an elastic worker has its own alone
        for path in (_file(folder, r) for r in needed if f"rank{r}" not in saved):
            saved |= _load(path)
    except FileNotFoundError:
        mistake = f"rank {rank}: no state to resume from at {path}; pass resume_from=..."
    except Exception as error:  # of the file, zip, pickle or PyTorch
        reason = " ".join(error_text(error).split())[:200]
        mistake = f"rank {rank}: cannot read {path} ({reason}); resume from another checkpoint"
    mistakes = [mistake]
    if size > 1:
        with ProcessGroupCommunicator() as comm:
            mistakes = comm.gather_objects(mistake)
    require(not any(mistakes), next(filter(None, mistakes), ""))
    return saved


def _load(path: Path) -> dict[str, Any]:
    saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return saved
