"""The strategy for parameters that are averaged without rounds: AD-PSGD (arXiv 1710.06952).

    compute side     forward, backward, optimizer.step() on the model's own parameters, which nobody else touches; then the
                     step's hook adds what averaging has changed meanwhile, and publishes the result
    averaging side   a thread that averages what was published with one other worker after another
                     (`average/pairwise.py` what two workers do, `pairwise_exchange.py` when, and how it ends)

Neither waits for the other but for the moment of a vector addition, so that a slow worker, or a slow line, slows nobody. What
averaging changes does not reach the parameters in the middle of a forward or backward pass, nor is a half-made step averaged.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..algorithm import require
from ..average.pairwise import Pairwise
from ..comm import Communicator, Ledger, ProcessGroupCommunicator
from .mean_model import consensus_distance, holding_mean
from .models import make_equal, updated_by
from .pairwise_exchange import PairwiseExchange


class AsynchronousGossip:
    """What `gossip_asynchronously` returns: asynchronous averaging at work on one model and its optimizer."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, averager: Pairwise, comm: Communicator, seed: int
    ):
        self._parameters = updated_by(optimizer, model)
        self._model, self._comm = model, comm
        self._state = averager.init(self._parameters, comm, seed)
        make_equal(model, comm)
        self._exchange = PairwiseExchange(averager, self._state, comm)
        self._hook = optimizer.register_step_post_hook(self._after_step)
        self._owns_comm = self._holds_mean = self._is_detached = self._has_raised = False

    @property
    def ledger(self) -> Ledger:
        """Every byte that this worker sent and received, with the dense sizes beside them."""
        return self._comm.ledger

    @property
    def seconds(self) -> dict[str, float]:
        """Wall-clock seconds so far by phase: publish, in `optimizer.step()`; average, send and wait, in the thread."""
        return dict(self._state.clock.seconds)

    @property
    def num_averaged(self) -> int:
        """How often this worker has averaged with another."""
        return self._state.averaged

    def set_epoch(self, epoch: int) -> None:
        """Averaging in pairs has no schedules; here so that a loop need not ask which strategy it has."""

    def consensus_distance(self, comm: Communicator | None = None) -> float:
        """How far workers' models are from their mean: `sqrt(1/W sum_i |x_i - mean|^2)`. All workers call it.

        Each counts with what it holds at its call; what is in flight then is not in it.

        Args:
            comm: over which to measure; by default the strategy's own, whose ledger then counts it.
        """
        self._publish("consensus_distance()")
        return consensus_distance([p for _, p in self._parameters], 1.0, comm or self._comm)

    @contextmanager
    def average_model(self, comm: Communicator | None = None) -> Iterator[None]:
        """Context in which the model holds the mean of all workers, and again its own bits after it, also on error.

        All workers enter it together, with what they hold then. Floating-point buffers hold their mean too, other buffers
        rank 0's. Averaging goes on meanwhile, on what was published before.

        Args:
            comm: over which to average; by default the strategy's own, whose ledger then counts it.
        """
        self._publish("average_model()")
        parameters, buffers = [p for _, p in self._parameters], list(self._model.buffers())
        with holding_mean(parameters, 1.0, buffers, comm or self._comm):
            self._holds_mean = True
            try:
                yield
            finally:
                self._holds_mean = False

    def synchronize(self) -> None:
        """Wait until all workers have called it, and absorb what is in flight; averaging goes on while waiting.

        Afterwards the mean over workers is exactly that of all steps so far, but for rounding.

        Raises:
            CommunicationError: another worker has failed; the message names it.
        """
        self._finish("synchronize()")
        self._comm.barrier()  # nobody begins anew before all have ended
        self._exchange.start()

    def state_dict(self) -> dict[str, Any]:
        """This worker's state, keyed by parameter name: what averaging has changed since the last step, and counts.

        Waits for the answer that is in flight. Each worker saves its own at a moment of its own, beside its model and optimizer
        as they are between the same two steps.
        """
        with self._exchange.settled():
            return self._state.state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; the model and the optimizer load their own, before the next step."""
        with self._exchange.settled():
            self._state.load_state_dict(saved)

    def detach(self) -> None:
        """Stop averaging. All workers call it, and go on averaging until the last one does; the model keeps its own values.

        Where it is called while an exception is on its way, such as in a `finally`, nobody is waited for: the others stop with
        an error that names this rank.
        """
        if self._is_detached:
            return
        self._is_detached = True
        self._hook.remove()
        error = sys.exc_info()[1]
        try:
            if error is not None:
                self._exchange.abort(f"rank {self._comm.rank} raised {error!r}")
            elif not self._has_raised:
                self._finish("detach()")
        finally:
            self._exchange.close()
            if self._owns_comm:
                self._comm.close()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        self._check()
        self._comm.ledger.add_dense(self._state.layout.numel)
        self._publish("optimizer.step()")
        self._exchange.after_step()

    def _finish(self, what: str) -> None:
        self._publish(what)  # who has made no step must be able to answer
        self._exchange.finish()
        self._publish(what)

    @torch.no_grad()
    def _publish(self, what: str) -> None:
        require(not self._holds_mean, f"{what} inside average_model() would be lost with the mean; call it after the context")
        self._state.publish(self._parameters)

    def _check(self) -> None:
        try:
            self._exchange.check()
        except Exception:
            self._has_raised = True
            raise


def gossip_asynchronously(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    averager: Pairwise,
    comm: Communicator | None = None,
    seed: int = 0,
) -> AsynchronousGossip:
    """Average the parameters of `model` with those of other workers whenever these are ready: AD-PSGD.

        x_i <- x_i + update_i,  whenever its gradient is ready;   x_i, x_j <- (x_i + x_j)/2,  whenever both are ready

    Workers keep no common pace, and need not make equally many steps: none waits for another before the end. Parameters and
    buffers are first made equal to rank 0's; buffers then stay each worker's own, and only `average_model()` averages them.
    Averaging works on copies in main memory, two of all parameters, and two more while it is under way.

    Args:
        model: any module.
        optimizer: any `torch.optim` optimizer; its parameters that are the model's and trainable take part.
        averager: `Pairwise()`.
        comm: how to communicate; by default a process group of its own over all workers, an even number.
        seed: the same on all workers; pairwise averaging draws no random numbers.

    Returns:
        A handle with `consensus_distance`, `average_model`, `synchronize`, `ledger`, `seconds`, `num_averaged`, `set_epoch`,
        `state_dict`, `load_state_dict` and `detach`. End with `detach` on all workers: one that leaves without is an error
        to the others.

    Raises:
        ValueError: nothing to average; on all workers together, where averagers or the models' shapes differ between them, or
            their number is odd.
        CommunicationError: in `optimizer.step()` and in the handle's methods, where another worker has failed; it names it.

    Source: Lian et al. 2018, AD-PSGD, arXiv 1710.06952.

    Example:
        >>> import torch, thinwire as tw
        >>> from thinwire.strategy.asynchronous import gossip_asynchronously
        >>> def worker(comm):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.zeros_(model.weight)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        ...     gossip = gossip_asynchronously(model, optimizer, tw.Pairwise(), comm)
        ...     model.weight.grad = torch.full((1, 1), -float(comm.rank))
        ...     optimizer.step()
        ...     gossip.detach()  # by then the two have averaged
        ...     return model.weight.item()
        >>> sum(tw.LocalWorld(2).run(worker))
        1.0
    """
    require(isinstance(averager, Pairwise), f"gossip_asynchronously: averager must be Pairwise(...), got {averager!r}")
    own_comm = ProcessGroupCommunicator() if comm is None else None
    gossip = AsynchronousGossip(model, optimizer, averager, comm or own_comm, seed)
    gossip._owns_comm = own_comm is not None
    return gossip
