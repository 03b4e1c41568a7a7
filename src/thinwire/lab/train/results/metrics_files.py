"""Writes the metrics of a run to its folder, row by row. The folder contains:

config.json       the configuration, with the `repr` of the strategy
metrics.jsonl     a row per log step; `docs/training.md` explains the columns
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
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ....algorithm import require
from ....messages import log
from ...files import check_row, is_at, naming, plain, write_whole

COLUMNS = """
step epoch loss accuracy top5_accuracy perplexity
test_loss test_accuracy test_top5_accuracy test_perplexity test_bleu
mean_model_test_loss mean_model_test_accuracy mean_model_test_top5_accuracy mean_model_test_perplexity mean_model_test_bleu
consensus_distance variance levels bits budget_bits error learning_rate skipped_steps
workers committed aborted healings merged_changes late_changes staleness clipped dropped_changes dropped_examples
bytes_sent bytes_received messages other_bytes_sent dense_fp32_bytes examples_per_second seconds virtual_seconds
data_seconds compute_seconds encode_seconds wait_seconds decode_seconds
""".split()
"""Of metrics.csv; `docs/training.md` explains them."""


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
            kept = "".join(json.dumps(row) + "\n" for row in info)
            write_whole(self._info_path, lambda unfinished: unfinished.write_text(kept))
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
