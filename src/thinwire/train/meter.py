"""What a row of metrics is made of: sums over batches, the ledger's totals, and where the time went."""

from __future__ import annotations

import time

import torch
from torch import Tensor
from torch.nn import functional as F

from ..clock import Clock
from ..comm import Communicator
from .strategy import Strategy


class Meter:
    """Adds up what happens between two rows.

    Args:
        strategy: whose ledger and clock are read.
        comm: connects the workers for the metrics' own sums.
    """

    def __init__(self, strategy: Strategy, comm: Communicator):
        self._strategy, self._comm = strategy, comm
        self._began = time.perf_counter()
        self._start_row()

    def _start_row(self) -> None:
        self.clock = Clock()
        self._row_began = time.perf_counter()
        self._phases = self._strategy.handle.seconds
        self._sums = torch.zeros(3, dtype=torch.float64)

    def add(self, scores: Tensor, labels: Tensor) -> None:
        """Count a batch: scores (N, classes) and labels (N,)."""
        self._sums += sums(scores, labels)

    def row(self) -> dict[str, float]:
        """Means over all workers: since the last row, and of the ledgers' totals. All workers call it together."""
        loss, accuracy, num_examples = averages(self._sums, self._comm)
        now, ledger = time.perf_counter(), self._strategy.handle.ledger
        totals = torch.tensor([ledger.bytes_sent, ledger.bytes_received, ledger.messages], dtype=torch.float64)
        totals = (self._comm.all_reduce(totals).wait() / self._comm.size).round().long()
        row = {
            "loss": loss,
            "accuracy": accuracy,
            **dict(zip(("bytes_sent", "bytes_received", "messages"), totals.tolist(), strict=True)),
            "examples_per_second": num_examples / (now - self._row_began),
            "seconds": now - self._began,
        }
        row |= self._seconds_by_phase()
        if self._strategy.models_differ:
            row["consensus_distance"] = self._strategy.handle.consensus_distance(self._comm)
        self._start_row()
        return row

    def _seconds_by_phase(self) -> dict[str, float]:
        took = {phase: after - self._phases.get(phase, 0.0) for phase, after in self._strategy.handle.seconds.items()}
        averaging = sum(took.get(phase, 0.0) for phase in self._strategy.phases_in_step)
        return {
            "compute_seconds": self.clock.seconds["step"] - averaging,
            "encode_seconds": took.get("compensate", 0.0) + took.get("encode", 0.0),
            "wait_seconds": took.get("wait", 0.0),
            "decode_seconds": took.get("decode", 0.0),
        }


def sums(scores: Tensor, labels: Tensor) -> Tensor:
    """Loss, correct answers and examples of a batch, as (3,) float64 that may be added up over batches and workers."""
    loss = F.cross_entropy(scores, labels, reduction="sum")
    correct = (scores.argmax(dim=1) == labels).sum()
    return torch.tensor([loss.item(), correct.item(), len(labels)], dtype=torch.float64)


def averages(sums_3: Tensor, comm: Communicator) -> tuple[float, float, int]:
    """Mean loss, accuracy 0..1 and number of examples over all workers."""
    loss, correct, count = comm.all_reduce(sums_3).wait().tolist()
    return loss / count, correct / count, int(count)
