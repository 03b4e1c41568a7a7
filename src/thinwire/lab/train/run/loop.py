"""One worker's run, from the first weight to the summary.

    1. data and model    the same on every worker, from the seed
    2. strategy          attach it to model and optimizer
    3. steps             batches (`steps.py`); forward, backward, clip, optimizer (`training.py`)
    4. metrics           a row every few steps (`meter.py`); after an epoch also a test (`evaluation.py`)
    5. checkpoint        after an epoch, every `checkpoint_every` steps, and when the run stops (`checkpoint.py`)
    6. summary           the test result and the bytes sent

If the folder has a checkpoint, the run continues from the last one: with the same bits as if it had never stopped, or with
another number of workers. All workers run this code. Rank 0 also shows the progress and writes the files. Metrics use a
communicator of their own, so that the ledger counts only the training.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from warnings import filterwarnings

import torch
from torch import Tensor

from ....algorithm import require
from ....allocator import keep_freed_memory
from ....comm import Communicator
from ....kernels import mix_key, set_threads
from ....strategy import AveragerAttachment
from ...files import write_json
from ..config import RunConfig
from ..data import Dataset
from ..folder import checkpoint
from ..folder.run_folder import begin
from ..optimize import set_learning_rate
from ..results.callbacks import Callback, EachStep, called
from ..results.codec_statistics import codec_statistics, own_gradients
from ..results.evaluation import evaluate
from ..results.meter import Meter
from ..results.metrics_files import MetricsWriter
from ..results.terminal import SkipWarning, Terminal
from ..results.weights_and_biases import WandB
from ..shared_errors import run_on_all, same_error_on_all
from ..step.image_sizes import check_image_sizes
from ..step.steps import course, steps
from ..step.training import prepare
from .interrupt import Interrupted, Interruption


def run(
    config: RunConfig,
    folder: Path,
    comm: Communicator,
    interruption: Interruption,
    callbacks: Sequence[Callback] = (),
) -> None:
    """Train with this configuration and write the results to `folder`; all workers call this together.

    Raises:
        Interrupted: a signal stopped the run; it can continue from its checkpoint.
        ValueError: on all workers, if data, configuration or checkpoint are wrong.
    """
    torch.set_num_threads(config.threads)
    set_threads(config.threads)
    keep_freed_memory()
    data = run_on_all(comm, config.data.load)
    ahead = run_on_all(comm, lambda: course(config, data, comm.size))
    device = run_on_all(comm, lambda: choose_device(config))
    with same_error_on_all():
        warnings = check_images(config, data, math.ceil(ahead.num_steps / ahead.per_epoch), device)
        training = prepare(config, data, device)
    run_on_all(comm, lambda: begin(config, folder) if comm.rank == 0 else None)
    for warning in warnings if comm.rank == 0 else []:
        print(f"thinwire: {warning}", file=sys.stderr, flush=True)
    torch.manual_seed(mix_key(config.seed, comm.rank, 0))  # from here on workers draw different numbers (dropout)
    meter = Meter(data, training.strategy, comm, training.virtual)
    checkpoints = folder / "checkpoints"
    loaded = checkpoint.load_latest(checkpoints, training, meter, comm)
    done, row, origin = loaded.step, loaded.row, loaded.origin
    if loaded.workers != comm.size:
        origin = course(config, data, loaded.workers, origin).place(done)
        if comm.rank == 0:
            text = f"goes on with {comm.size} workers from a checkpoint of {loaded.workers}"
            print(f"thinwire: {text}; their memory is dealt out anew", file=sys.stderr, flush=True)
    ahead = course(config, data, comm.size, origin)
    num_steps = ahead.num_steps

    with same_error_on_all():
        require(
            done < num_steps or "bytes_sent" in row,
            f"{checkpoints / checkpoint.name_of(done)} is the end of the run and has no row of metrics; remove this folder "
            "to go on from the checkpoint before it",
        )
    is_tested = row.get("step") == num_steps and f"test_{data.best_metric}" in row
    if done >= num_steps and not is_tested:  # what is left makes no step for this many workers
        row |= {"step": num_steps} | evaluate(config, data, training.model, training.strategy, comm)
    training.virtual.begin(training.strategy.comm, comm, meter.virtual_seconds)

    at_rows = [callback for callback in callbacks if not isinstance(callback, EachStep)]
    at_steps = [callback for callback in callbacks if isinstance(callback, EachStep)]
    filterwarnings("ignore", r"\w+: a step was not finite", RuntimeWarning)  # `SkipWarning` speaks for all workers
    watchers = run_on_all(
        comm, lambda: watching(config, folder, num_steps, data.best_metric, done) if comm.rank == 0 else []
    )
    try:
        for step in steps(config, data, comm, done, meter.clock, origin):
            if step.begins_epoch is not None:
                training.strategy.set_epoch(step.begins_epoch)
                training.carried = None
            learning_rate = config.optimizer.learning_rate_at(
                ahead.scheduled(step.number - 1), ahead.num_scheduled, comm.size
            )
            set_learning_rate(training.optimizer, learning_rate)
            row_is_due = step.number % config.log_every == 0 or step.ends_epoch
            watched = config.variance and row_is_due and comm.rank == 0
            collecting: AbstractContextManager[dict[str, Tensor]] = (
                own_gradients(training.model) if watched else nullcontext({})
            )
            with meter.clock("step"), training.virtual.step(), collecting as gradients:
                answers = training.step(step.batches)
            for scores, labels in answers:
                meter.add(scores, labels)
            if at_steps:
                now = {"step": step.number, "epoch": step.epoch, "learning_rate": learning_rate}
                if info := called(at_steps, training.model, now, comm):
                    for watcher in watchers:
                        watcher.info({"step": step.number} | info)
            in_rounds = training.strategy.averager.has_rounds  # workers without rounds synchronise only at rows
            stop = interruption.requested(comm, at_once=not in_rounds) if in_rounds or row_is_due else 0
            is_saved = stop or step.ends_epoch or step.number % (config.checkpoint_every or num_steps) == 0
            if is_saved:
                training.strategy.settle()  # so that the row of a checkpoint counts the bytes of whole rounds
            if row_is_due:
                row = {"step": step.number, "epoch": step.epoch, "learning_rate": learning_rate} | meter.row()
                row |= codec_statistics(training.strategy, gradients)
                if step.number == num_steps or (step.ends_epoch and round(step.epoch) % config.evaluate_every == 0):
                    row |= evaluate(config, data, training.model, training.strategy, comm)
                row |= called(at_rows, training.model, row, comm)
                for watcher in watchers:
                    watcher.row(row)
            if is_saved:
                checkpoint.save(checkpoints, step.number, training, meter, row, comm, origin)
                if comm.rank == 0:
                    checkpoint.tidy(checkpoints, step.number, config, data.best_metric)
            if stop:
                break
    finally:
        for watcher in watchers:
            watcher.close()

    finished = row.get("step") == num_steps
    if finished and comm.rank == 0:
        write_json(folder / "summary.json", summary(config, data, row, training.strategy))
    training.detach()
    if not finished:
        raise Interrupted(stop, checkpoints / checkpoint.name_of(step.number))


def watching(config: RunConfig, folder: Path, num_steps: int, metric: str, done: int) -> list[Any]:
    """Receivers of each row of metrics; they have `row(values)`, `info(values)` and `close()`."""
    skips = SkipWarning(config.precision, config.parsed_strategy().max_nonfinite)
    watchers = [Terminal(folder.name, num_steps, metric, done), MetricsWriter(folder, done), skips]
    return [*watchers, WandB(config, folder)] if config.wandb else watchers


def check_images(config: RunConfig, data: Dataset, num_epochs: int, device: torch.device) -> list[str]:
    """Warn of image sizes at which parts of a kernel see only padding; see `image_sizes`.

    Raises:
        ValueError: the model cannot take an image size, or its gradients there would be wrong on this device.
    """
    train, test = data.image_shapes(num_epochs)
    bf16_on_cpu = device.type == "cpu" and config.precision == "bf16"
    return check_image_sizes(config.model, data.num_classes, train, test, bf16_on_cpu)


def choose_device(config: RunConfig) -> torch.device:
    """Choose the device of this worker. Workers on one machine share its GPUs.

    Raises:
        ValueError: the configuration asks for a GPU, and there is none.
    """
    found = torch.cuda.is_available()
    require(
        found or config.device != "cuda", "device 'cuda' was asked for, but PyTorch finds no GPU; leave --device out"
    )
    if not found or config.device == "cpu":
        return torch.device("cpu")
    return local_gpu()


def local_gpu() -> torch.device:
    """The GPU of this worker. Workers on one machine share its GPUs."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())


def summary(config: RunConfig, data: Dataset, last: dict[str, float], strategy: AveragerAttachment) -> dict[str, Any]:
    """The contents of `summary.json`. Bytes are means over the workers."""
    ledger, bytes_sent = strategy.ledger, last["bytes_sent"]
    tested = {key: value for key, value in last.items() if key.startswith(("test_", "mean_model_", "consensus_"))}
    return {
        "recipe": config.recipe,
        "strategy": repr(strategy.strategy),
        "workers": config.workers,
        "seed": config.seed,
        "metric": f"test_{data.best_metric}",
        "final": tested | {"train_accuracy": last["accuracy"], "train_loss": last["loss"], "steps": last["step"]},
        "skipped_steps": last["skipped_steps"],
        "bytes_sent_per_worker": bytes_sent,
        "dense_fp32_bytes": ledger.dense_fp32_bytes,
        "dense_bf16_bytes": ledger.dense_bf16_bytes,
        "compression_vs_fp32": ledger.dense_fp32_bytes / bytes_sent if bytes_sent else None,
        "seconds": last["seconds"],
    } | {key: value for key, value in last.items() if key == "virtual_seconds"}
