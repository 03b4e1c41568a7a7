"""Transformers: a callback for its Trainer. Needs the packages `transformers` and `accelerate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..algorithm import require
from ..average import Averager
from ..comm import ProcessGroupCommunicator
from ..strategy import GradientCompression, compress_gradients
from . import trainer_package
from .numbers import numbers, summary

with trainer_package("transformers"):
    from transformers import ProgressCallback, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class CompressGradients(TrainerCallback):
    """Averages the gradients of a `Trainer` on several processes with `averager`.

    The callback attaches when training begins, and tells schedules the epoch. It adds bytes, savings and waiting time to the
    trainer's log, and shows them in its progress bar. It saves each worker's memory beside the trainer's checkpoint, in
    `checkpoint-N/thinwire-rankR.pt`. With one process there is nothing to average, and the callback does nothing.

    Args:
        trainer: the trainer to attach to; it must not be training yet.
        averager: such as `Mean(TopK(0.01), ErrorFeedback())`.
        resume_from: folder of the checkpoint that training continues; by default `checkpoint-N` in the output folder,
            where N is the step at which the trainer resumes.
        options: further arguments of `compress_gradients`.

    Raises:
        ValueError: when training begins, if the model is sharded, or a resumed checkpoint lacks the memory of any worker.

    Example:
        >>> from thinwire.integrations.transformers import CompressGradients
        >>> # trainer = transformers.Trainer(model, args, train_dataset=data)
        >>> # CompressGradients(trainer, tw.Mean(tw.QSGD(bits=4)))
        >>> # trainer.train()
    """

    def __init__(self, trainer: Trainer, averager: Averager, *, resume_from: str | Path | None = None, **options: Any):
        self._trainer, self._averager, self._options = trainer, averager, options
        self._resume_from = resume_from
        self.handle: GradientCompression | None = None
        trainer.callback_handler.callbacks.insert(0, self)  # before those that report what `on_log` adds

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach to the model, which the trainer has wrapped by now, and restore this worker's memory."""
        if args.world_size == 1:
            return
        if self.handle is not None:
            self.handle.detach()  # unless the training before ended, with an error
        resumes, folder = state.global_step > 0, Path(self._resume_from or self._folder(args, state))
        saved = _read(self._file(folder, args), args.process_index) if resumes else None
        model, scaler = self._trainer.model_wrapped, self._trainer.accelerator.scaler
        self.handle = compress_gradients(model, self._averager, scaler=scaler, **self._options)
        if saved is not None:
            self.handle.load_state_dict(saved)

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
        """Save this worker's memory beside the trainer's checkpoint."""
        if self.handle is not None:
            folder = self._folder(args, state)
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(self.handle.state_dict(), self._file(folder, args))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop averaging."""
        if self.handle is not None:
            self.handle.detach()

    @staticmethod
    def _folder(args: TrainingArguments, state: TrainerState) -> Path:
        """The trainer's checkpoint folder at this step."""
        assert args.output_dir is not None, "TrainingArguments fills in its default"
        return Path(args.output_dir) / f"checkpoint-{state.global_step}"

    @staticmethod
    def _file(folder: Path, args: TrainingArguments) -> Path:
        return folder / f"thinwire-rank{args.process_index}.pt"


def _read(path: Path, rank: int) -> dict[str, Any]:
    """The memory that this worker saved. All workers call it together, and all raise the error of any."""
    saved: dict[str, Any] = {}
    mistake = None
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        mistake = f"rank {rank}: no memory to resume from at {path}; pass resume_from=..."
    except Exception as error:  # of the file, zip, pickle or PyTorch
        mistake = (
            f"rank {rank}: cannot read {path} ({' '.join(str(error).split())[:200]}); resume from another checkpoint"
        )
    with ProcessGroupCommunicator() as comm:
        mistakes = [text for text in comm.gather_objects(mistake) if text is not None]
    require(not mistakes, "".join(mistakes[:1]))
    return saved
