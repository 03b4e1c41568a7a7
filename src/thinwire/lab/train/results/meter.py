"""Collects the values of a row of metrics: sums over batches, bytes of the ledger, and seconds by phase."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from ....clock import Clock
from ....comm import Communicator, Ledger
from ....strategy import AveragerAttachment, OwnModelAttachment
from ..data import Dataset
from ..step.virtual import VirtualTime

COUNTS = ("bytes_sent", "bytes_received", "messages", "other_bytes_sent")


class Meter:
    """Sums over the batches between two rows.

    Args:
        data: turns sums into metrics.
        strategy: has the ledger and the clock.
        virtual: the clock of the modelled network.
        other_ledger: of rows, tests and checkpoints; None if the strategy's own has them.
    """

    def __init__(
        self, data: Dataset, strategy: AveragerAttachment, virtual: VirtualTime, other_ledger: Ledger | None = None
    ):
        self._data, self._strategy, self._virtual = data, strategy, virtual
        self.virtual_seconds = 0.0
        """Of the run before a resume."""
        self._began = time.perf_counter()
        self._skipped_before = 0
        self._other_ledger = other_ledger or Ledger(1)
        self._other_bytes_before = -self._other_ledger.bytes_sent
        self.clock = Clock()
        """Times the phases "data" and "step"."""
        self._start_row()

    def _start_row(self) -> None:
        self._row_began = time.perf_counter()
        self._phases = self._all_phases()
        self._sums = torch.zeros(self._data.num_sums, dtype=torch.float64)
        self._num_examples = 0

    def _all_phases(self) -> dict[str, float]:
        return {**self._strategy.seconds, **self.clock.seconds}

    def add(self, scores: Tensor, labels: Tensor) -> None:
        """Count a batch: scores (N, ...) and labels (N, ...)."""
        self._sums += self._data.checked_sums(scores, labels)
        self._num_examples += len(labels)

    def row(self, comm: Communicator) -> dict[str, float]:
        """The row: means over all workers since the last row, and of the ledgers' totals. All workers call it together."""
        row = self.begin_row(comm)()
        if self._strategy.models_differ:
            # Models differ only under gossip and local updates.
            gossip = cast(OwnModelAttachment, self._strategy)
            row["consensus_distance"] = gossip.consensus_distance(comm)
        return row

    def begin_row(self, comm: Communicator) -> Callable[[], dict[str, float]]:
        """Begin to sum the row over the workers; returns a function that waits for them, and gives the row.

        All workers call it equally often, though not at the same time. The row has no consensus distance.
        """
        now, ledger = time.perf_counter(), self._strategy.ledger
        counts = [ledger.bytes_sent, ledger.bytes_received, ledger.messages, self._other_bytes_sent]
        counts += [self._num_examples, self._num_skipped]
        # One message for all numbers of a row.
        summed = comm.all_reduce(torch.cat([self._sums, torch.tensor(counts, dtype=torch.float64)]))
        own = {"dense_fp32_bytes": ledger.dense_fp32_bytes, "seconds": now - self._began}
        own |= self._all_virtual_seconds() | self._seconds_by_phase()
        seconds = now - self._row_began
        self._last = self._row_began, self._phases, self._sums, self._num_examples
        self._start_row()

        def finish() -> dict[str, float]:
            totals = summed.wait()
            sums, counts = totals.split([self._data.num_sums, len(COUNTS) + 2])
            sums[-1] = sums[-1] or math.nan  # rounds may follow at once, without a batch between them
            sent = (counts[: len(COUNTS)] / comm.size).round().long().tolist()
            row = self._data.metrics(sums) | dict(zip(COUNTS, sent, strict=True)) | own
            num_examples, skips = counts[len(COUNTS) :].tolist()
            # Where models are equal, all workers skip together.
            row["skipped_steps"] = round(skips) if self._strategy.models_differ else round(skips) // comm.size
            return row | {"examples_per_second": num_examples / seconds}

        return finish

    def continue_row(self) -> None:
        """Go on with the row that was begun last: the next one also has what that one has. All workers call it together."""
        self._row_began, self._phases, sums, num_examples = self._last
        self._sums += sums
        self._num_examples += num_examples

    def state_dict(self) -> dict[str, Any]:
        """The part of a checkpoint: this worker's sums since the last row, and its ledger."""
        now, ledger = time.perf_counter(), self._strategy.ledger
        took = {
            "seconds": now - self._began,
            "row_seconds": now - self._row_began,
            "phase_seconds": self._phases_of_row(),
        }
        sums = {"sums": self._sums, "num_examples": self._num_examples, "num_skipped": self._num_skipped}
        sent = {"ledger": ledger.state_dict(), "other_bytes_sent": self._other_bytes_sent}
        return took | sums | sent | self._all_virtual_seconds()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore the result of `state_dict`. Bytes sent for the restart do not count."""
        self._start_row()
        self._began, self._row_began = self._row_began - saved["seconds"], self._row_began - saved["row_seconds"]
        self._phases |= {phase: self._phases.get(phase, 0.0) - took for phase, took in saved["phase_seconds"].items()}
        self._sums, self._num_examples = saved["sums"].clone(), saved["num_examples"]
        self._skipped_before = saved["num_skipped"]
        self._strategy.ledger.load_state_dict(saved["ledger"])
        self._other_bytes_before = saved["other_bytes_sent"] - self._other_ledger.bytes_sent
        self.virtual_seconds = saved.get("virtual_seconds", 0.0)

    def _all_virtual_seconds(self) -> dict[str, float]:
        """Virtual seconds since the start, before a resume too; nothing without a network. All workers call it together."""
        if self._virtual.network is not None:
            self._strategy.settle()  # what is under way leaves its trace
        seconds = self._virtual.seconds()
        return {} if seconds is None else {"virtual_seconds": seconds}

    def redistribute(self, saved: list[dict[str, Any]], rank: int, size: int, together: bool) -> dict[str, Any]:
        """The part of worker `rank` of `size`, from those of all workers before: sums are kept, and means of bytes.

        Args:
            saved: what `state_dict` returned on each worker, in rank order.
            rank: of this worker.
            size: the new number of workers.
            together: whether all workers skip a step together; if not, their skips are added up.
        """
        mine = saved[rank::size]
        sums = {
            "sums": sum((one["sums"] for one in mine), start=torch.zeros(self._data.num_sums, dtype=torch.float64)),
            "num_examples": sum(one["num_examples"] for one in mine),
            "num_skipped": saved[0]["num_skipped"] if together else sum(one["num_skipped"] for one in mine),
        }
        others = sum(one["other_bytes_sent"] for one in saved) // len(saved)
        return saved[0] | sums | {"ledger": mean_ledger([one["ledger"] for one in saved]), "other_bytes_sent": others}

    @property
    def _other_bytes_sent(self) -> int:
        """By this worker since the start of the run, before a resume too."""
        return self._other_bytes_before + self._other_ledger.bytes_sent

    @property
    def _num_skipped(self) -> int:
        """Steps that this worker has skipped since the start of the run, before a resume too."""
        return self._skipped_before + self._strategy.num_skipped

    def _phases_of_row(self) -> dict[str, float]:
        return {phase: after - self._phases.get(phase, 0.0) for phase, after in self._all_phases().items()}

    def _seconds_by_phase(self) -> dict[str, float]:
        took = self._phases_of_row()
        averaging = sum(took.get(phase, 0.0) for phase in self._strategy.phases_in_step)
        return {
            "data_seconds": took.get("data", 0.0),
            # Workers that meet at a quorum's end average outside of steps.
            "compute_seconds": max(0.0, took.get("step", 0.0) - averaging),
            "encode_seconds": took.get("compensate", 0.0) + took.get("encode", 0.0),
            "wait_seconds": took.get("wait", 0.0),
            "decode_seconds": took.get("decode", 0.0),
        }


def mean_ledger(saved: list[dict[str, Any]]) -> dict[str, Any]:
    """The mean of saved ledgers, count by count, so that the bytes of a worker stay what they were on average."""
    names = sorted({name for one in saved for name in one["collectives"]})
    traffic = {}
    for name in names:
        found = [one["collectives"][name] for one in saved if name in one["collectives"]]
        traffic[name] = {count: round(sum(one[count] for one in found) / len(saved)) for count in found[0]}
    return saved[0] | {"collectives": traffic}
