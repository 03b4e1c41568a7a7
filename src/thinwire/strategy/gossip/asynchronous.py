"""The strategy for parameters that are averaged without rounds, as data and at work: AD-PSGD (arXiv 1710.06952).

    training      forward, backward, optimizer.step() on the model's own parameters, which averaging does not touch. Then the
                  step's hook adds the changes that averaging has made meanwhile, and publishes the result.
    averaging     a thread averages the published values with one other worker after another
                  (`average/gossip/pairwise.py`: what two workers do; `pairwise_exchange.py`: when, and how it ends)

Neither waits for the other, except for the moment of a vector addition. So a slow worker or a slow link delays nobody.
Parameters do not change during a forward or backward pass, and averaging never sees a half-finished step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...average.base import NamedTensors
from ...average.gossip.pairwise import Pairwise
from ...comm import Communicator
from ...options import require_integer, require_kind
from ..model.models import refuse_shards
from ..own_model import OwnModelAttachment
from ..strategy import Averaging, Rhythm, Runtime
from ..told import attach_together
from .pairwise_exchange import PairwiseExchange


class AsynchronousGossip(OwnModelAttachment):
    """What `Asynchronous` attaches: asynchronous averaging at work on one model and its optimizer.

    The phases of `seconds` are publish, in `optimizer.step()`, and average, send and wait, in the thread.
    """

    call = "Asynchronous"
    phases_in_step = ("publish",)
    """The thread does the rest."""
    strategy: Asynchronous

    def __init__(self, strategy: Asynchronous, model: nn.Module, optimizer: Optimizer | None, runtime: Runtime):
        refuse_shards(self.call, model)
        super().__init__(strategy, model, optimizer, runtime)
        self._has_raised = False
        self._broken_off_by: str | None = None  # the error

    def attach(self) -> None:
        """Connect the workers, and begin to average."""
        averager = self.strategy.averager
        with self._attaching() as comm:
            self._follow(comm)
            self._record = self._state = averager.init(self._live.tensors(), comm)
            self._exchange = PairwiseExchange(averager, self._state, comm)
            self._on_drop(self._exchange.drop, f"rank {comm.rank} has hung up: its strategy was never detached")
            self._on_detach(lambda: self._exchange.close(self._broken_off_by))

    @property
    def blocked_seconds(self) -> float:
        """Wall-clock seconds so far that the training has waited for the thread that averages."""
        return self.seconds.get("publish", 0.0)

    @property
    def num_averaged(self) -> int:
        """How often this worker has averaged with another."""
        averaged: int = self._state.averaged
        return averaged

    def set_epoch(self, epoch: int) -> None:
        """Check the epoch, and do nothing else: averaging in pairs has no schedules. Workers need not call it together."""
        require_integer("epoch", epoch, 0)

    def synchronize(self) -> None:
        """Wait until all workers have called it, and absorb the messages in flight. Averaging goes on during the wait.

        Afterwards the mean over workers is the start plus the mean of all updates so far, up to rounding.

        Raises:
            CommunicationError: another worker has failed; the message names it.
        """
        self._end_averaging("synchronize()")
        self.comm.barrier()  # nobody begins again before all have ended
        self._exchange.start()

    # ---- what the base asks for ----

    def state_dict(self) -> dict[str, Any]:
        """The changes since the last step, and counts. Waits for the answer in flight; workers may save at different times."""
        with self._exchange.settled():
            return super().state_dict()

    def load_state_dict(self, saved: dict[str, Any], among: tuple[int, int] = (0, 1)) -> None:
        """As in `AveragerAttachment`; on another number of workers every one goes on from the mean model."""
        with self._exchange.settled():
            super().load_state_dict(saved, among)

    def _averaged(self) -> list[tuple[Any, NamedTensors]]:
        return []

    def _before_look(self, what: str, comm: Communicator | None) -> Communicator:
        comm = super()._before_look(what, comm)
        self._publish(what)
        return comm

    def _finish(self) -> None:
        """Go on averaging until the last worker detaches."""
        if not self._has_raised:
            self._end_averaging("detach()")

    def _abandon(self, error: BaseException) -> None:
        """Stop at once; the other workers stop with an error that names this rank."""
        self._broken_off_by = repr(error)

    # ---- one step of the optimizer ----

    def _after_step(self) -> None:
        self._check()
        self._publish("optimizer.step()")
        self._exchange.after_step()

    def _end_averaging(self, what: str) -> None:
        self._publish(what)  # a worker that has made no step must be able to answer too
        self._exchange.finish()
        self._publish(what)  # adds what the thread has averaged meanwhile

    @torch.inference_mode(False)
    @torch.no_grad()
    def _publish(self, what: str) -> None:
        self._require_own_model(what)
        self._state.publish(self._live.tensors())

    def _check(self) -> None:
        try:
            self._exchange.check()
        except Exception:
            self._has_raised = True
            raise


@dataclass(frozen=True, repr=False)
class Asynchronous(Averaging[AsynchronousGossip]):
    """Average the parameters of a model with those of one other worker whenever both are ready: AD-PSGD.

        x_i <- x_i + update_i,  whenever its gradient is ready;   x_i, x_j <- (x_i + x_j)/2,  whenever both are ready

    There are no rounds. Workers need not step equally often or at the same pace, and none waits for another before the end.
    Parameters and buffers are first made equal to rank 0's. Buffers then stay local; only `average_model()` averages them.
    Averaging works on copies in main memory: two of all parameters, and two more while a pair averages.

    The parameters are looked up in the model at each step, so `p.data = ...` is fine. Converting, replacing, adding or
    unfreezing parameters later is an error that names the parameter. float64 parameters are averaged in float64, complex ones
    as pairs of real numbers.

    It needs no scaler and no seed: workers may skip steps. The number of workers must be even. The trainable parameters that
    the optimizer updates take part; the model may not be sharded. Attached, it has `consensus_distance`, `average_model`,
    `synchronize`, `ledger`, `seconds`, `num_averaged`, `num_skipped`, `set_epoch`, `state_dict`, `load_state_dict` and
    `detach`. End with `detach` on all workers: a worker that leaves without it is an error on the others. `optimizer.step()`
    and these methods raise a `CommunicationError` that names a worker that has failed.

    Args:
        averager: who averages with whom.
        on_nonfinite: what a worker does if its own gradient is infinite or NaN: "skip" its update and still average, "raise" an
            error, or "apply" it, which spreads to all workers.
        max_nonfinite: with "skip", how many such steps in a row are an error.

    Raises:
        ValueError: another averager, or a value out of range.

    Source: Lian et al. 2018, AD-PSGD, arXiv 1710.06952.

    Example:
        >>> import torch, thinwire as tw
        >>> def worker(comm):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.zeros_(model.weight)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        ...     gossip = tw.attach(model, optimizer, tw.Asynchronous(), comm=comm)
        ...     model.weight.grad = torch.full((1, 1), -float(comm.rank))
        ...     optimizer.step()
        ...     gossip.detach()  # by then the two have averaged
        ...     return model.weight.item()
        >>> sum(tw.LocalWorld(2).run(worker))
        1.0
    """

    averager: Pairwise = Pairwise()

    def __post_init__(self) -> None:
        hint = "; averagers with rounds are for Gossip"
        require_kind("Asynchronous: averager", self.averager, Pairwise, "Pairwise(...)", hint=hint)
        super().__post_init__()

    @property
    def rhythm(self) -> Rhythm:
        """Messages fly at any time."""
        return Rhythm(delay=1)

    def _attached(self, model: nn.Module, optimizer: Optimizer | None, runtime: Runtime) -> AsynchronousGossip:
        self._require(
            runtime.replicas is None, "replicas are of sharded models, whose shards must be averaged at the same step"
        )
        return attach_together(model, runtime, lambda: AsynchronousGossip(self, model, optimizer, runtime))


def gossip_asynchronously(
    model: nn.Module,
    optimizer: Optimizer,
    averager: Pairwise | None = None,
    *,
    comm: Communicator | None = None,
    **options: Any,
) -> AsynchronousGossip:
    """Attach `Asynchronous(averager, **options)` to a model and its optimizer. See `attach` for the arguments.

    Example:
        >>> import torch, thinwire as tw
        >>> def worker(comm):
        ...     model = torch.nn.Linear(1, 1)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        ...     with tw.gossip_asynchronously(model, optimizer, comm=comm) as handle:
        ...         return handle.strategy
        >>> tw.LocalWorld(2).run(worker)
        [Asynchronous(), Asynchronous()]
    """
    strategy = Asynchronous(**options) if averager is None else Asynchronous(averager, **options)
    return strategy.attach(model, optimizer, comm=comm)
