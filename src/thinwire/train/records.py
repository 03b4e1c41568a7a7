"""The files that a run leaves behind, all in its own folder:

    config.json       the configuration, with the `repr` of the averager
    metrics.jsonl     a row per log step; `COLUMNS` says what they hold. Written row by row: a run that was
    metrics.csv       stopped keeps the rows that it had
    tensorboard/      the same numbers as TensorBoard events
    checkpoints/      the last checkpoint, see `checkpoint.py`
    summary.json      the result; its presence says that the run was finished
"""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

from ..algorithm import require
from .config import RunConfig

COLUMNS = {
    "step": "optimizer steps so far",
    "epoch": "passes over the training data so far, with a fraction",
    "loss": "training loss, mean over the workers' batches since the last row",
    "accuracy": "training accuracy, likewise; 0..1",
    "top5_accuracy": "share of training examples whose class is among the first five answers, likewise",
    "perplexity": "of text: exp of the loss, likewise",
    "test_loss": "loss on the held-out test set, at the end of an epoch only. Where models differ, mean over the workers",
    "test_accuracy": "accuracy there, 0..1; likewise",
    "test_top5_accuracy": "share of classes among the first five answers there; likewise",
    "test_perplexity": "of text: exp of the loss there; likewise",
    "test_bleu": "of translations: BLEU (sacreBLEU) there, 0..100; likewise",
    "mean_model_test_loss": "where models differ, loss of the model whose parameters are their mean; at the end of an epoch",
    "mean_model_test_accuracy": "its accuracy, likewise",
    "mean_model_test_top5_accuracy": "its accuracy among the first five answers, likewise",
    "mean_model_test_perplexity": "its perplexity, likewise",
    "mean_model_test_bleu": "its BLEU, likewise",
    "consensus_distance": "where models differ, root mean square over the workers of their distance to the mean model",
    "learning_rate": "of the last step",
    "bytes_sent": "by a worker, to average and to begin with equal weights, since the start; from the ledger, mean",
    "bytes_received": "likewise",
    "messages": "sent by a worker, likewise",
    "examples_per_second": "of all workers together, since the last row",
    "seconds": "since the first step began",
    "data_seconds": "rank 0's waiting for batches, or making them, since the last row",
    "compute_seconds": "rank 0's steps since the last row, less the averaging in them; these phases may overlap",
    "encode_seconds": "compensate and encode: of gradients in the backward pass, of parameters in the optimizer's step",
    "wait_seconds": "waiting for bytes: on a thread of its own while training goes on, but for parameters without overlap",
    "decode_seconds": "decoding what came, likewise",
}


def make_folder(config: RunConfig) -> Path:
    """Make the run's folder: a name that was given must be free, unless it may be overwritten; ours is numbered.

    Raises:
        ValueError: the folder is taken, or cannot be made or written.
    """
    folder = config.output / (config.name or config.default_name)
    try:
        if config.overwrite and folder.exists():
            require((folder / "config.json").is_file(), f"{str(folder)!r} is not a run; --overwrite leaves it alone")
            shutil.rmtree(folder)
        return _claim(folder, numbered=config.name is None)
    except OSError as error:
        reason = f"cannot write to the output folder {str(config.output)!r}: {error.strerror}"
        raise ValueError(f"{reason}; choose another with --output") from None


def _claim(folder: Path, numbered: bool) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    for number in range(1, 10_000):
        candidate = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        try:
            candidate.mkdir()  # fails where it exists: of two runs that start at once, one takes the next number
            return candidate
        except FileExistsError:
            require(numbered, f"{str(folder)!r} exists; choose another --name, or replace it with --overwrite")
    raise ValueError(f"{str(folder)!r} and 9999 numbered ones exist; choose a --name")


class Records:
    """Writes a run's metrics; for rank 0 alone.

    Args:
        folder: the run's own folder.
    """

    def __init__(self, folder: Path):
        from torch.utils.tensorboard import SummaryWriter

        self.folder = folder
        self._jsonl = (folder / "metrics.jsonl").open("w", buffering=1)
        self._csv_file = (folder / "metrics.csv").open("w", buffering=1, newline="")
        self._csv = csv.DictWriter(self._csv_file, COLUMNS)
        self._csv.writeheader()
        self._events = SummaryWriter(folder / "tensorboard")

    def row(self, values: dict[str, float]) -> None:
        """Append a row; keys are among `COLUMNS`."""
        self._jsonl.write(json.dumps(plain(values)) + "\n")
        self._csv.writerow(values)
        for name, value in values.items():
            if name != "step":
                self._events.add_scalar(name, value, values["step"])

    def close(self) -> None:
        """Flush and close all files."""
        for file in (self._jsonl, self._csv_file, self._events):
            file.close()


def write_json(path: Path, value: Any) -> None:
    """Write a file whole or not at all: whoever reads it never sees a part."""
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(plain(value), indent=2) + "\n")
    os.replace(unfinished, path)


def plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: a loss that diverged is written as null."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
