"""What a worker of an elastic run shares with those that join, beside the strategy's own: the trainer's steps and schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ..comm import ElasticCommunicator
from ..strategy import AveragerAttachment

ROUNDS = "rounds"
"""In the state of a worker: which rounds it is made of."""


class ElasticState:
    """The state of a worker whose trainer knows of no others, and what those that join take over from it.

    It is shared until the strategy detaches.

    Args:
        strategy: what `attach` returned.
        comm: the communicator that it was given.
        optimizers: those that step on the model.
        schedulers: of the learning rates.
        each_step: those of them that the trainer steps after each of its steps.
        steps: returns how many steps the trainer counts.
        set_steps: lets the trainer count so many.

    Example:
        >>> import torch, thinwire as tw
        >>> from thinwire.integrations.elastic import ElasticState
        >>> class Trainer:
        ...     step = 7
        >>> trainer, model = Trainer(), torch.nn.Linear(2, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> schedules = [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)]
        >>> count = (lambda: trainer.step), (lambda steps: setattr(trainer, "step", steps))
        >>> lighthouse = tw.comm.Lighthouse(min_workers=1, host="127.0.0.1")
        >>> with tw.comm.ElasticCommunicator(lighthouse.address, number=3, min_workers=1) as comm:
        ...     with tw.attach(model, optimizer, "Local(Mean(), every=1)", comm=comm) as strategy:
        ...         state = ElasticState(strategy, comm, [optimizer], schedules, schedules, *count)
        ...         state.begin_step()
        ...         model(torch.ones(1, 2)).sum().backward()
        ...         optimizer.step()
        ...         state.state_dict()["rounds"]["rounds"]
        1
        >>> lighthouse.close()
    """

    def __init__(
        self,
        strategy: AveragerAttachment,
        comm: ElasticCommunicator,
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[LRScheduler],
        each_step: Sequence[LRScheduler],
        steps: Callable[[], int],
        set_steps: Callable[[int], None],
    ):
        self._strategy, self._comm = strategy, comm
        self._schedulers, self._each_step = schedulers, each_step
        self._steps, self._set_steps = steps, set_steps
        if not strategy.models_differ:  # else the strategy shares its optimizer
            for i, one in enumerate(optimizers):
                strategy._on_detach(comm.share(f"optimizer {i}", one.state_dict, one.load_state_dict))
        # Schedules may follow what each worker measures by itself.
        strategy._on_detach(comm.share("trainer", self._progress, self._take_over, is_common=False))

    def _progress(self) -> dict[str, Any]:
        return {"steps": self._steps(), "schedulers": [one.state_dict() for one in self._schedulers]}

    def _take_over(self, progress: dict[str, Any]) -> None:
        self._set_steps(progress["steps"])
        for scheduler, state in zip(self._schedulers, progress["schedulers"], strict=True):
            scheduler.load_state_dict(state)

    def begin_step(self) -> None:
        """Begin a round unless one is open, and count the steps that a worker which joins leaves out."""
        self._strategy.begin_round()
        skipped, self._comm.num_skipped = self._comm.num_skipped, 0
        if skipped:
            self._set_steps(self._steps() + skipped)
        for scheduler in self._each_step:
            for _ in range(skipped):
                scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """The state of this worker. All workers call it after the same step, because it ends the round in flight."""
        if not self._strategy.is_detached:
            self._strategy.settle()
        return self._strategy.state_dict() | {ROUNDS: self._comm.state_dict()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, before the first step. That of a run that was not elastic has no rounds."""
        self._comm.load_state_dict(saved.get(ROUNDS, {"rounds": 0}))
        self._strategy.load_state_dict({key: value for key, value in saved.items() if key != ROUNDS})
