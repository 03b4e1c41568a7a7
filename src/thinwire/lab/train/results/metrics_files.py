"""Writes the metrics of a run to its folder, row by row. The folder contains:

config.json       the configuration, with the `repr` of the strategy
metrics.jsonl     a row per log step; `COLUMNS` explains the columns
metrics.csv       the same rows, for spreadsheets
info.jsonl        what callbacks log between rows, a line each
tensorboard/      the same numbers as TensorBoard events
checkpoints/      the last checkpoints and the best, see `checkpoint.py`
summary.json      the result; it exists only when the run has finished

Where machines have a folder each, what columns say of rank 0 is of the first worker of the folder.
"""

from __future__ import annotations

import csv
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ....algorithm import require
from ...files import is_at, naming, plain

log = logging.getLogger("thinwire")

COLUMNS = {
    "step": "optimizer steps so far; with a quorum, committed examples, in steps of all workers together",
    "epoch": "passes over the training data so far, with a fraction",
    "loss": "training loss, mean over the workers' batches since the last row; of classes and text the cross-entropy without "
    "label smoothing. Null if it was infinite or NaN for any",
    "accuracy": "training accuracy, likewise; 0..1",
    "top5_accuracy": "share of training examples whose class is among the five highest scores, likewise",
    "perplexity": "of text: exp of the loss, likewise",
    "test_loss": "the same on the held-out test set, at the end of an epoch only. Where models differ, mean over the workers",
    "test_accuracy": "accuracy there, 0..1; likewise",
    "test_top5_accuracy": "share of test examples whose class is among the five highest scores; likewise",
    "test_perplexity": "of text: exp of the loss there; likewise",
    "test_bleu": "of translations: BLEU (sacreBLEU) there, 0..100; likewise",
    "mean_model_test_loss": "where models differ, loss of the model whose parameters are their mean; at the end of an epoch",
    "mean_model_test_accuracy": "its accuracy, likewise",
    "mean_model_test_top5_accuracy": "its accuracy among the first five answers, likewise",
    "mean_model_test_perplexity": "its perplexity, likewise",
    "mean_model_test_bleu": "its BLEU, likewise",
    "consensus_distance": "where models differ, root mean square over the workers of their distance to the mean model",
    "variance": "where asked for, relative variance |Q(g) - g|^2 / |g|^2 of the codec on rank 0's own gradient g of this step",
    "levels": "if the codec's levels adapt: the levels in use, ascending from -1 to 1",
    "bits": "if the codec is fitted to layers: bits an element of the present choice",
    "budget_bits": "likewise, bits an element that it may take; they follow the line where asked for",
    "error": "likewise, its relative squared error |C(x) - x|^2 / |x|^2, as measured last on all workers, memory included",
    "learning_rate": "of the last step",
    "skipped_steps": "updates skipped for an infinite or NaN gradient, since the start. Where models differ, sum over workers",
    "workers": "in elastic runs: number of workers in the last round",
    "committed": "in elastic runs and with a quorum: rounds so far that were committed",
    "aborted": "in elastic runs: rounds so far that were given up, such as when a worker died",
    "healings": "in elastic runs: how often a worker that joined or fell behind got the state of a live one",
    "merged_changes": "with a quorum: changes that rounds have merged so far, each of one worker and fragment",
    "late_changes": "with a quorum: those of them that missed a round",
    "staleness": "with a quorum: rounds that a merged change has missed, mean so far",
    "clipped": "with a quorum: norms of what clipping dropped so far, added up",
    "dropped_changes": "with a quorum: changes so far that came too late",
    "dropped_examples": "with a quorum: training examples that these were made from; they do not count in step and epoch",
    "bytes_sent": "bytes a worker sent since the start, for averaging and equal initial weights; from the ledger, mean",
    "bytes_received": "likewise",
    "messages": "sent by a worker, likewise",
    "other_bytes_sent": "bytes a worker sent since the start for all else: rows, tests, checkpoints; mean. In elastic runs 0: "
    "bytes_sent has them",
    "dense_fp32_bytes": "that rank 0 would have sent so far with dense float32 collectives in every step",
    "examples_per_second": "of all workers together, since the last row",
    "seconds": "since the first step began",
    "virtual_seconds": "with --network: seconds of the steps so far on that network, of the slowest worker",
    "data_seconds": "seconds that rank 0 waited for batches or made them, since the last row",
    "compute_seconds": "seconds in rank 0's steps since the last row, without averaging; these phases may overlap",
    "encode_seconds": "compensate and encode: of gradients in the backward pass, of parameters in the optimizer's step",
    "wait_seconds": "waiting for bytes: beside the training, or for parameters without overlap in the training thread",
    "decode_seconds": "decoding received bytes, likewise",
}


class MetricsWriter:
    """Writes a run's metrics. The first worker of each folder has one.

    Args:
        folder: the run's folder.
        done: number of steps before a resume; rows of later steps are dropped.
        metrics: of the data set. Each gets a column of metrics.csv, and one for the test.
    """

    def __init__(self, folder: Path, done: int = 0, metrics: Sequence[str] = ()):
        # Slow to import, and only the worker that writes needs it.
        from torch.utils.tensorboard import SummaryWriter

        tested = [prefix + name for prefix in ("", "test_", "mean_model_test_") for name in metrics]
        self._columns = list(dict.fromkeys([*COLUMNS, *tested]))
        self._path, self._step = folder / "metrics.jsonl", -1  # of the last row
        self._paths = (self._path, folder / "metrics.csv")
        self._begin(read_rows(self._path, done))
        self._info_path, info = folder / "info.jsonl", read_rows(folder / "info.jsonl", done)
        if self._info_path.exists():
            unfinished = folder / "info.jsonl.tmp"  # a run that is killed here keeps the old file
            unfinished.write_text("".join(json.dumps(row) + "\n" for row in info))
            os.replace(unfinished, self._info_path)
        # TensorBoard hides what was logged after the checkpoint, because those steps come again.
        self._events = SummaryWriter(folder / "tensorboard", purge_step=done + 1 if done else None)

    def _begin(self, rows: list[dict[str, Any]]) -> None:
        """Open both files of metrics with these rows. They replace older ones once the rows are in."""
        # Line by line, so that `thinwire watch` sees each row at once and a killed run keeps it.
        self._files = [open(f"{path}.tmp", "w+", buffering=1, newline="") for path in self._paths]
        self._csv = csv.DictWriter(self._files[1], self._columns, extrasaction="ignore")
        self._csv.writeheader()
        for row in rows:
            self._write(row)
        for path in self._paths:
            os.replace(f"{path}.tmp", path)

    def _write(self, row: dict[str, Any]) -> None:
        with naming(self._path):
            self._files[0].write(json.dumps(row) + "\n")
            self._csv.writerow(row)
        self._step = row["step"]

    def row(self, values: dict[str, Any]) -> None:
        """Append a row. It replaces the last row if both have the same step, as at the end of an epoch with a quorum.

        Other columns, which callbacks add, are left out of metrics.csv. A file that was deleted meanwhile
        is written anew, with all of its rows.
        """
        files = zip(self._paths, self._files, strict=True)
        gone = [path for path, file in files if not is_at(file.fileno(), path)]
        is_again = values["step"] == self._step
        if gone or is_again:
            with self._files[0] as before, self._files[1]:
                before.seek(0)
                rows = [json.loads(line) for line in before]
                self._begin(rows[:-1] if is_again else rows)  # an error if the folder is gone too
        for path in gone:
            log.warning(f"{path} was deleted or replaced, and is written anew")
        self._write(plain(values))
        self._write_events(values)

    def info(self, values: dict[str, Any]) -> None:
        """Log values between two rows; `step` is among them."""
        with naming(self._info_path), self._info_path.open("a") as file:
            file.write(json.dumps(plain(values)) + "\n")
        self._write_events(values)

    def _write_events(self, values: dict[str, Any]) -> None:
        with naming(self._path.with_name("tensorboard")):
            for name, value in values.items():
                if name not in ("step", "levels"):
                    self._events.add_scalar(name, value, values["step"])

    def close(self) -> None:
        """Flush and close all files."""
        with naming(self._path):
            for file in self._files:
                file.close()
            self._events.close()


def read_rows(path: Path, done: int) -> list[dict[str, Any]]:
    """Read the rows of `metrics.jsonl` up to a step. A killed run may have left half a row at the end, which is dropped.

    Raises:
        ValueError: another line is damaged; the message names file and line.
    """
    try:
        lines = path.read_bytes().split(b"\n") if path.exists() else []
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from None
    rows = []
    for number, line in enumerate(lines[:-1], start=1):  # a whole line ends with a newline
        try:
            row = json.loads(line)
            check_row(row)
            require("step" in row, "it has no step")
        except ValueError as error:
            raise ValueError(
                f"line {number} of {path} is damaged: {error}; remove that line, or the file, to go on without it"
            ) from None
        rows.append(row)
    return [row for row in rows if row["step"] <= done]


def check_row(row: Any) -> None:
    """Check that a row of metrics holds numbers. Callbacks add columns that are not in `COLUMNS`.

    Raises:
        ValueError: it does not.

    Example:
        >>> check_row({"step": 10, "loss": 0.5, "accuracy": None})
    """
    require(isinstance(row, dict), f"expected a row of metrics, got {type(row).__name__}")
    step = row.get("step", 0)
    require(isinstance(step, int) and step >= 0, f"step is {step!r}, expected a number from 0 on")
    wrong = [name for name, value in row.items() if not (name == "levels" or _is_number(value))]
    require(not wrong, f"{', '.join(wrong[:3])} should be a number or null")


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))
