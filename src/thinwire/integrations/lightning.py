"""Lightning: a callback that averages gradients with thinwire. Needs the package `lightning`."""

from __future__ import annotations

from typing import Any

from ..average import Averager
from ..comm import ProcessGroupCommunicator
from ..strategy import GradientCompression, compress_gradients
from . import trainer_package
from .numbers import numbers, short_numbers
from .state import AllWorkersState

with trainer_package("lightning"):
    import lightning.pytorch as pl


class CompressGradients(pl.Callback):
    """Averages the gradients of a DDP training with `averager`.

    The callback attaches when training begins, and tells schedules the epoch. It logs bytes, savings and waiting time every
    `log_every_n_steps` of the trainer, and shows them in the progress bar. It saves the memory of all workers in the
    trainer's checkpoints. Lightning registers communication hooks on CUDA only; this callback works on every device.
    With one device there is nothing to average, and the callback does nothing.

    Args:
        averager: such as `Mean(TopK(0.01), ErrorFeedback())`.
        seed: seed of the codec's random numbers; the same on all workers.
        on_nonfinite: what to do if the gradients of a step are not finite; see `compress_gradients`.

    Raises:
        ValueError: when training begins, if Lightning has sharded the model, or if averager and optimizer both apply
            momentum.

    Example:
        >>> import thinwire as tw
        >>> from thinwire.integrations.lightning import CompressGradients
        >>> callback = CompressGradients(tw.Mean(tw.QSGD(bits=4)))
        >>> # trainer = lightning.Trainer(strategy="ddp", devices=4, callbacks=[callback])
    """

    def __init__(self, averager: Averager, *, seed: int = 0, on_nonfinite: str = "skip"):
        self._averager, self._seed, self._on_nonfinite = averager, seed, on_nonfinite
        self._saved: dict[str, Any] | None = None
        self.handle: GradientCompression | None = None
        self._is_attached = self._has_failed = False

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Attach to the model, which Lightning has wrapped by now."""
        if trainer.world_size == 1:
            return
        scaler = getattr(trainer.precision_plugin, "scaler", None)  # only mixed precision in float16 has one
        model = trainer.strategy.model
        assert model is not None, "Lightning sets up its strategy before on_fit_start"
        self.handle = compress_gradients(
            model, self._averager, scaler=scaler, seed=self._seed, on_nonfinite=self._on_nonfinite
        )
        self._is_attached, self._has_failed = True, False
        for optimizer in trainer.optimizers:  # else their first step would find out
            self.handle.check_optimizer(optimizer)
        if self._saved is not None:
            AllWorkersState(self.handle).load_state_dict(self._saved)
            self._saved = None

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Tell schedules that count epochs."""
        if self.handle is not None:
            self.handle.set_epoch(trainer.current_epoch)

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
        """Put the memory of all workers into the checkpoint. Lightning calls this on all workers."""
        # After an error other workers need not come here, so nothing is gathered.
        if self.handle is None or self._has_failed:
            return
        state = AllWorkersState(self.handle)
        if self._is_attached:
            checkpoint["thinwire"] = state.state_dict()
        else:  # `save_checkpoint` after `fit`, which closed the handle's communicator
            with ProcessGroupCommunicator() as comm:
                checkpoint["thinwire"] = state.state_dict(comm)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the saved memory until the model is wrapped. `validate`, `test` and `predict` have no use for it."""
        if trainer.state.fn == "fit":
            self._saved = checkpoint.get("thinwire")

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Stop averaging."""
        if self.handle is not None and stage == "fit":
            self._is_attached = False
            self.handle.detach()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Stop averaging, so that the process can end."""
        # Lightning does not call `teardown` of callbacks after an error.
        self.teardown(trainer, pl_module, "fit")
        self._has_failed = True
