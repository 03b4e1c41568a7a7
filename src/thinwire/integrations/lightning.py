"""Lightning: a callback that sets a strategy to work. Needs the package `lightning`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from ..algorithm import require
from ..attaching import attach
from ..comm import Group
from ..strategy import AveragerAttachment, GradientCompression
from ..strategy.model.ddp import wrapped_ddp
from ..strategy.strategy import Averaging
from . import averaging, elastic_of, is_alone, trainer_package
from .elastic import ElasticState
from .numbers import numbers, short_numbers
from .state import AllWorkersState

with trainer_package("lightning"):
    import lightning.pytorch as pl


class AttachStrategy(pl.Callback):
    """Sets a strategy to work in a training with DDP, or with a model that `configure_model` shards.

    The callback attaches when training begins, and tells schedules the epoch. It logs bytes, savings and waiting time every
    `log_every_n_steps` of the trainer, and shows them in the progress bar. It saves the states of all workers in the
    trainer's checkpoints. Lightning registers communication hooks on CUDA only; this callback works on every device.
    With one device there is nothing to average, and the callback does nothing.

    Where each worker has a model of its own, the trainer validates and saves the mean of all workers, and ends with it. Its
    checkpoints also hold all workers' models and optimizers, so that a resumed run goes on bit for bit.

    With an `ElasticCommunicator` as `comm` each worker is a process with a trainer of one device and an output folder of its
    own, started by no launcher. A round begins with each step. A worker that joins takes over the step and the learning-rate
    schedules of the others too, so that all end at the same `max_steps`. Each validates and saves its own model, and goes on
    from its own checkpoint.

    Args:
        strategy: such as `Gradients(Mean(TopK(0.01), ErrorFeedback()))`, or its notation.
        replicas: for a sharded model, which workers hold replicas: a function of the module, whose mesh exists only when
            training begins, such as `lambda module: module.device_mesh["data_parallel"]`.
        options: further arguments of `thinwire.attach`, such as `comm`.

    Raises:
        ValueError: the strategy cannot be read or has a quorum; when training begins, if it does not suit the model, such as
            one that is sharded without `replicas`, if averager and optimizer both apply momentum, or if models differ between
            workers and a callback averages weights over steps.

    Example:
        >>> import thinwire as tw
        >>> from thinwire.integrations.lightning import AttachStrategy
        >>> callback = AttachStrategy(tw.Gradients(tw.Mean(tw.QSGD(bits=4))))
        >>> # trainer = lightning.Trainer(strategy="ddp", devices=4, callbacks=[callback])
    """

    def __init__(
        self,
        strategy: Averaging[Any] | str,
        *,
        replicas: Callable[[pl.LightningModule], Group] | None = None,
        **options: Any,
    ):
        self._strategy, self._replicas, self._options = averaging(strategy, together=True), replicas, options
        require(
            replicas is None or callable(replicas),
            f"AttachStrategy: replicas must be a function of the module, got {replicas!r}; write "
            'replicas=lambda module: module.device_mesh["data_parallel"]',
        )
        self._elastic = elastic_of(options)
        self._saved: dict[str, Any] | None = None
        self.handle: AveragerAttachment | None = None
        self._state: AllWorkersState | ElasticState | None = None
        self._mean = ExitStack()  # of workers, while the trainer validates
        self._has_failed = False

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Attach to the model, which Lightning has wrapped by now."""
        if self._elastic is None and is_alone(trainer.world_size, self._options):
            return
        scaler = getattr(trainer.precision_plugin, "scaler", None)  # only mixed precision in float16 has one
        model, optimizers = trainer.strategy.model, trainer.optimizers
        assert model is not None, "Lightning sets up its strategy before on_fit_start"
        optimizer = optimizers[0] if len(optimizers) == 1 else None
        require(
            optimizer is not None or not self._strategy.models_differ,
            f"AttachStrategy: {self._strategy} follows the steps of one optimizer, and the module has {len(optimizers)}; "
            "return one from configure_optimizers, with a group of parameters for each, or use Gradients(...)",
        )
        for callback in trainer.callbacks if self._strategy.models_differ else []:  # type: ignore[attr-defined]
            # By name, because older versions of Lightning have only one of them.
            require(
                all(
                    base.__name__ not in ("StochasticWeightAveraging", "WeightAveraging")
                    for base in type(callback).__mro__
                ),
                f"AttachStrategy: {type(callback).__name__} would put an average over the steps of this worker alone in place "
                f"of the model, and models of {self._strategy} differ between workers; leave it out, or use Gradients(...)",
            )
        replicas = None if self._replicas is None else self._replicas(pl_module)
        self.handle = attach(model, optimizer, self._strategy, replicas=replicas, scaler=scaler, **self._options)
        self._state = self._new_state(trainer, pl_module)
        self._has_failed = False
        if isinstance(self.handle, GradientCompression):
            for one in optimizers:  # else their first step would find out
                self.handle.check_optimizer(one)

    def _new_state(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> AllWorkersState | ElasticState:
        assert self.handle is not None
        if self._elastic is None:
            return AllWorkersState(self.handle, pl_module, trainer.optimizers)
        loop = trainer.fit_loop.epoch_loop
        automatic, manual = loop.automatic_optimization.optim_progress, loop.manual_optimization.optim_step_progress
        count = automatic.optimizer.step.total if pl_module.automatic_optimization else manual.total

        def set_steps(steps: int) -> None:
            count.ready = count.completed = loop._batches_that_stepped = steps  # the last is what loggers see

        configs = trainer.lr_scheduler_configs
        schedulers: list[Any] = [one.scheduler for one in configs]
        each_step: list[Any] = [
            one.scheduler
            for one in configs
            if (one.interval, one.frequency, one.reduce_on_plateau) == ("step", 1, False)
        ]
        steps = partial(getattr, trainer, "global_step")
        return ElasticState(self.handle, self._elastic, trainer.optimizers, schedulers, each_step, steps, set_steps)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Go on from what was saved, once Lightning has loaded its optimizers."""
        if self._state is not None and self._saved is not None:
            self._state.load_state_dict(self._saved)
            self._saved = None

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Tell schedules that count epochs."""
        if self.handle is not None:
            self.handle.set_epoch(trainer.current_epoch)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin a round of an elastic run. Let DDP send nothing where each worker has a model of its own."""
        if isinstance(self._state, ElasticState):
            self._state.begin_step()
        ddp = None if trainer.strategy.model is None else wrapped_ddp(trainer.strategy.model)
        if ddp is not None and self._has_own_model:
            # Lightning turns it on again after each forward pass of manual optimization.
            ddp.require_backward_grad_sync = False

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log this worker's bytes and waiting time, in the log and in the progress bar."""
        if self.handle is not None:
            pl_module.log_dict(numbers(self.handle))
            pl_module.log_dict(short_numbers(self.handle), prog_bar=True, logger=False)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Put the states of all workers into the checkpoint. Lightning calls this on all workers."""
        # After an error other workers need not come here, so nothing is gathered.
        if self._state is None or self._has_failed:
            return
        if self._has_own_model:
            assert self.handle is not None
            with self.handle.average_model():
                checkpoint["state_dict"] = copy.deepcopy(trainer.strategy.lightning_module_state_dict())
        checkpoint["thinwire"] = self._state.state_dict()

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the saved states until training begins. `validate`, `test` and `predict` have no use for it."""
        if trainer.state.fn == "fit":
            self._saved = checkpoint.get("thinwire")

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Validate the mean of all workers."""
        if self.handle is not None and self._has_own_model:
            self._mean.enter_context(self.handle.average_model())

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take this worker's own model again."""
        self._mean.close()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop averaging; models that differ become their mean."""
        if self._strategy.models_differ:  # later, Lightning has moved the model
            self._detach()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Stop averaging."""
        if stage == "fit":
            self._detach()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Stop averaging, so that the process can end."""
        # Lightning does not call `teardown` of callbacks after an error.
        self._mean.close()
        self._detach()
        self._has_failed = True

    @property
    def _has_own_model(self) -> bool:
        """Whether this worker's model differs from those of the trainer's other processes, of which an elastic run has none."""
        is_attached = self.handle is not None and not self.handle.is_detached
        return self._strategy.models_differ and is_attached and self._elastic is None

    def _detach(self) -> None:
        if self.handle is not None:
            self.handle.detach()
