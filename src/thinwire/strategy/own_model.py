"""What gossip and local updates share: each worker has a model of its own, and one optimizer steps on it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..algorithm import require
from ..comm import Communicator
from .base import AveragerAttachment
from .model.live_parameters import LiveParameters
from .model.mean_model import consensus_distance, holding_mean


class OwnModelAttachment(AveragerAttachment):
    """A strategy at work whose workers have models of their own: what one can look at, and when the optimizer may step.

    A derived class sets `_optimizer` and `_live`, and says how to get ready for a look at the model (`_before_look`).
    """

    _optimizer: torch.optim.Optimizer
    _live: LiveParameters
    _holds_mean = False

    def consensus_distance(self, comm: Communicator | None = None) -> float:
        """How far workers' models are from their mean: `sqrt(1/W sum_i |z_i - mean|^2)`. Does not change the training.

        All workers call it. Messages in flight do not count yet.

        Args:
            comm: over which to measure; by default the strategy's own, whose ledger then counts it.
        """
        self._shards.reshard()
        self._live.check()
        comm = self._before_look("consensus_distance()", comm)
        return consensus_distance([p for _, p in self.parameters], self._weight, comm, self._shards)

    @contextmanager
    def average_model(self, comm: Communicator | None = None) -> Iterator[None]:
        """Context in which the model holds the mean of all workers. It restores the worker's own bits, also on an error.

        All workers enter it together. Floating-point buffers hold their mean too, other buffers rank 0's. Messages in flight
        do not count yet.

        Args:
            comm: over which to average; by default the strategy's own, whose ledger then counts it.
        """
        self._shards.reshard()
        self._live.check()
        comm = self._before_look("average_model()", comm)
        parameters, buffers = [p for _, p in self._live.tensors()], list(self._model.buffers())
        with holding_mean(parameters, self._weight, buffers, comm):
            self._holds_mean = True
            try:
                yield
            finally:
                self._holds_mean = False
                self._shards.reshard()

    # ---- what a derived class defines ----

    @property
    def _weight(self) -> float:
        """The weight of this worker's model in the mean; 1.0 but for push-sum."""
        return 1.0

    @abstractmethod
    def _before_look(self, what: str, comm: Communicator | None) -> Communicator:
        """Get ready for a look at the model through the call `what`; returns the communicator to use."""

    # ---- what a derived class uses ----

    def _require_own_model(self, what: str) -> None:
        require(
            not self._holds_mean,
            f"{what} inside average_model() would be lost with the mean; call it after the context",
        )

    def _require_own_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        require(
            optimizer is self._optimizer,
            f"{self.call}: another {type(optimizer).__name__} steps on parameters that are attached with their own "
            "optimizer, so that no averaging would follow; detach(), and attach the new optimizer",
        )
