"""The strategy for gradients: average them while the backward pass still runs.

`compress_gradients` attaches an averager to a model that is wrapped in `DistributedDataParallel`, through its
communication hook, or to a plain module, through buckets and hooks of our own (`buckets.py`). What happens in a backward
pass stands in `gradient_rounds.py`.

Before a step of an optimizer over these parameters, a hook makes sure that all trainable parameters take part and that
momentum is applied once; and it leaves out the gradients of a round that was not finite, so that nothing is updated.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..algorithm import require
from ..average.base import Averager, NamedTensors
from ..codec import Codec
from ..comm import Communicator
from .base import Strategy
from .buckets import GradientBuckets
from .dgc_sgd import check_optimizer
from .gradient_rounds import GradientRounds
from .mean_model import holding_mean
from .models import as_real, kind_of, make_equal, refuse_ddp, trainable
from .optimizer_step import Arguments, once_gradients_are_there


class GradientCompression(Strategy):
    """What `compress_gradients` returns, and the state of `gradient_hook`: the averager at work on one model."""

    call = "compress_gradients"
    averager: Averager

    def __init__(
        self,
        model: nn.Module,
        averager: Averager,
        comm: Communicator | None,
        scaler: Any,
        seed: int,
        on_nonfinite: str,
        max_nonfinite: int,
        ddp: DistributedDataParallel | None = None,
    ):
        require(
            isinstance(averager, Averager) and averager.gives_one_mean,
            f"{averager} moves tensors towards their neighbours', which suits parameters; gradients need an averager "
            "that gives all workers one mean, such as Mean or PowerSGD",
        )
        refuse_ddp(self.call, model)
        self._ignored: Collection[str] = () if ddp is None else ddp.parameters_to_ignore
        super().__init__(model, trainable(model, self._ignored), averager, comm, on_nonfinite, max_nonfinite)
        self._names = {id(p): name for name, p in self.parameters}
        self._kinds = {name: kind_of(p) for name, p in self.parameters}
        self._scaler, self._seed, self._ddp = scaler, seed, ddp
        self._buckets: GradientBuckets | None = None
        self._rounds: GradientRounds | None = None
        self._saved: dict[str, Any] | None = None
        self._warn_unused: finalize[..., GradientCompression] | None = None

    @property
    def seconds(self) -> dict[str, float]:
        """Wall-clock seconds so far by phase: compensate, encode, exchange, wait, decode.

        Waiting and decoding run beside the backward pass; `blocked` is what it had to wait for when it was done.
        """
        return super().seconds

    @property
    def codec(self) -> Codec | None:
        """The codec of the coming round; `handle.codec.levels` are the levels that ALQ or AMQ has found so far."""
        return self.averager.current_codec(self._state)

    @contextmanager
    def average_model(self, comm: Communicator | None = None) -> Iterator[None]:
        """Context in which buffers (running statistics) hold the mean of all workers'; parameters are equal anyway.

        All workers enter it together.

        Args:
            comm: what the exact mean travels over; by default the averager's own, whose ledger then counts it.
        """
        with holding_mean([], 1.0, list(self._model.buffers()), comm or self.comm):
            yield

    def no_sync(self) -> AbstractContextManager[None]:
        """Context in which backward only accumulates; the first backward after it averages the sum."""
        if self._ddp is not None:
            return self._ddp.no_sync()
        require(
            self._buckets is not None, "no_sync is that of the model in DistributedDataParallel, which has the hook"
        )
        assert self._buckets is not None
        return self._buckets.no_sync()

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Make sure that momentum is applied once: by the averager, as `tw.dgc` does, or by the optimizer.

        Every step of an optimizer over these parameters is checked anyway; this finds out before the first.

        Raises:
            ValueError: both do.
        """
        if self.averager.has_momentum:
            check_optimizer(optimizer, [p for _, p in self.parameters])

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore what this worker's `state_dict` returned; before the first bucket, as soon as workers are connected.

        Raises:
            ValueError: it is another worker's, another number of workers', or another configuration's.
        """
        if self._state is None:
            self._saved = saved
        else:
            super().load_state_dict(saved)

    def detach(self) -> None:
        """Stop averaging and end the threads. A plain module is left as it was; gradients then stay local.

        DDP keeps a hook for life, so a detached DDP model raises in its next backward: wrap the module anew.
        """
        super().detach()

    # ---- attaching ----

    def _ready(self) -> None:
        """Connect the workers, if the first bucket has not done so; all of them come here."""
        if self._state is None:
            with self._attaching() as comm:
                self._begin(comm)

    def _begin(self, comm: Communicator) -> None:
        self._state = self.averager.init([(name, as_real(p)) for name, p in self.parameters], comm, self._seed)
        self._rounds = GradientRounds(self.averager, self._state, comm, self._scaler, self._nonfinite)
        if self._saved is not None:
            self.load_state_dict(self._saved)
            self._saved = None

    def _attach_ddp(self, ddp: DistributedDataParallel) -> None:
        with self._attaching(ddp.process_group) as comm:
            self._begin(comm)
            ddp.register_comm_hook(self, _ddp_hook)

    def _attach_plain(self, bucket_bytes: int) -> None:
        require(bucket_bytes > 0, f"bucket_bytes must be positive, got {bucket_bytes}")
        with self._attaching() as comm:
            make_equal(self._model, comm, bucket_bytes=bucket_bytes)
            self._begin(comm)
            self._buckets = GradientBuckets(self.parameters, self._launch, bucket_bytes)
            self._on_detach(self._buckets.remove)

    # ---- at work ----

    def _launch(self, tensors: NamedTensors, buffer: Tensor, first: bool, last: bool) -> torch.futures.Future[Tensor]:
        if self._warn_unused is not None:
            self._warn_unused.detach()
        self._ready()
        assert self._rounds is not None
        require(not self._is_detached, f"{self.call} was detached from this model; wrap the module in DDP anew")
        if first:
            self._check_unchanged()
        return self._rounds.launch([(name, as_real(g)) for name, g in tensors], buffer, first, last)

    def _before_optimizer_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments:
        self._check_unchanged()
        self.check_optimizer(optimizer)
        return once_gradients_are_there(args, kwargs, lambda: self._drop_if_nonfinite(optimizer))

    def _drop_if_nonfinite(self, optimizer: torch.optim.Optimizer) -> None:
        """Optimizers leave parameters without a gradient as they are, with their momentum, decay and number of steps."""
        if self._rounds is not None and self._rounds.skips:
            for p in (p for group in optimizer.param_groups for p in group["params"] if id(p) in self._names):
                p.grad = None

    def _check_unchanged(self) -> None:
        """Raise a ValueError where a trainable parameter takes no part, or is not what it was."""
        # Runs twice in every step, so messages are built only where they are raised.
        for name, p in self._model.named_parameters():
            if p.requires_grad and id(p) not in self._names and name not in self._ignored:
                raise ValueError(
                    f"parameter {name!r} was added, replaced or unfrozen after {self.call} attached, so that its gradient "
                    f"would stay local; detach(), and call {self.call} again"
                )
        for name, p in self.parameters:
            now = kind_of(p)
            if now != self._kinds[name]:
                raise ValueError(
                    f"parameter {name!r} is {now} now and was {self._kinds[name]} when {self.call} attached; convert the "
                    "model first, then attach"
                )

    def _expect_buckets(self) -> None:
        """Warn if no bucket has come when the strategy is detached, or when the process ends."""
        text = "gradient_hook: the hook never got a bucket, so that nothing was averaged by it; register it with the DDP model"
        self._warn_unused = finalize(self, warnings.warn, text, RuntimeWarning)

    def _finish(self) -> None:
        if self._warn_unused is not None:
            self._warn_unused()
        if self._rounds is not None:
            self._rounds.close()

    def _abandon(self, error: BaseException) -> None:
        if self._rounds is not None:
            self._rounds.abandon()
            self._rounds.close()

    def _own_state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._state.state_dict()
        return state

    def _load_own(self, saved: dict[str, Any]) -> None:
        self._state.load_state_dict(saved)


def compress_gradients(
    model: nn.Module,
    averager: Averager,
    *,
    comm: Communicator | None = None,
    scaler: Any = None,
    seed: int = 0,
    bucket_bytes: int = 10 * 2**20,
    on_nonfinite: str = "skip",
    max_nonfinite: int = 100,
) -> GradientCompression:
    """Average the gradients of `model` over all workers with `averager`, during every backward pass.

    One line is added to an ordinary training loop; when `loss.backward()` returns, `param.grad` holds the averaged
    gradient on every worker, bit for bit the same. A model in `DistributedDataParallel` keeps its buckets, and `no_sync`,
    `find_unused_parameters`, `static_graph` and `gradient_as_bucket_view` mean what they do there. A plain module gets
    buckets of our own; its parameters and buffers are first made equal to rank 0's; parameters that got no gradient
    count as zero and receive the average like all others. Frozen parameters take no part.

    Args:
        model: a `DistributedDataParallel` model without another communication hook, or any module.
        averager: such as `Mean(TopK(0.01), ErrorFeedback())`.
        comm: how to communicate; by default a process group of its own over DDP's workers, or over all.
        scaler: the `torch.amp.GradScaler` in use, so that memory is kept in unscaled units.
        seed: seed of the codec's random numbers; the same on all workers.
        on_nonfinite: what happens where the averaged gradient is infinite or NaN, which it is on all workers together:
            "skip" (no optimizer updates these parameters, memory stays as it was), "raise" (backward raises), or "apply".
        max_nonfinite: with "skip", as many such backward passes in a row raise a FloatingPointError.
        bucket_bytes: size of the buckets of a plain module, in gradients before encoding; smaller => sending starts
            earlier, at more messages.

    Returns:
        A handle with `ledger`, `seconds`, `num_skipped`, `no_sync`, `set_epoch`, `check_optimizer`, `state_dict`,
        `load_state_dict` and `detach`; also a context manager that detaches at its end.

    Raises:
        ValueError: a parameter that takes part in another strategy, a model without values (meta device) or sharded; on
            all workers together, where averagers, tensor shapes, their order or `bucket_bytes` differ between them. In
            backward and in the optimizer's step: a parameter was added, replaced or unfrozen since.
        FloatingPointError: in backward, on all workers, as `on_nonfinite` says; it names the first worker and parameter.

    Example:
        >>> import torch, thinwire as tw
        >>> def worker(comm):
        ...     model = torch.nn.Linear(2, 1, bias=False)
        ...     handle = tw.compress_gradients(model, tw.Mean(tw.QSGD(bits=8)), comm=comm)
        ...     model(torch.full((1, 2), float(comm.rank))).sum().backward()
        ...     handle.detach()
        ...     return model.weight.grad.tolist()
        >>> tw.LocalWorld(2).run(worker)
        [[[0.5, 0.5]], [[0.5, 0.5]]]
    """
    ddp = model if isinstance(model, DistributedDataParallel) else None
    module = model if ddp is None else ddp.module
    strategy = GradientCompression(module, averager, comm, scaler, seed, on_nonfinite, max_nonfinite, ddp)
    if ddp is None:
        strategy._attach_plain(bucket_bytes)
    else:
        strategy._attach_ddp(ddp)
    return strategy


def gradient_hook(
    model: nn.Module,
    averager: Averager,
    *,
    scaler: Any = None,
    seed: int = 0,
    on_nonfinite: str = "skip",
    max_nonfinite: int = 100,
) -> tuple[GradientCompression, Callable[[GradientCompression, Any], torch.futures.Future[Tensor]]]:
    """The same as a plain `(state, hook)` pair, for trainers that wrap the model in DDP themselves.

    Lightning takes it as `DDPStrategy(ddp_comm_state=state, ddp_comm_hook=hook)`; after Accelerate's `prepare` it is
    `model.register_comm_hook(state, hook)`. It may be built before the process group: the communicator is made, and
    the workers' configurations are compared, when the first bucket arrives. A hook that never gets a bucket, because
    the trainer did not register it, warns when the state is detached or the process ends.

    Args:
        model: the module itself, before it is wrapped.
        averager, scaler, seed, on_nonfinite, max_nonfinite: as in `compress_gradients`.

    Returns:
        The state, which is what `compress_gradients` returns, and the hook.
    """
    strategy = GradientCompression(model, averager, None, scaler, seed, on_nonfinite, max_nonfinite)
    strategy._expect_buckets()
    return strategy, _ddp_hook


def _ddp_hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations and cannot read postponed ones
    """The hook that DDP calls with each bucket as soon as its gradients are there."""
    names = [state._names[id(p)] for p in bucket.parameters()]
    require(
        not bucket.buffer().is_sparse,
        f"the gradient of {names[0]!r} is sparse; build its embedding with sparse=False",
    )
    named = list(zip(names, bucket.gradients(), strict=True))
    return state._launch(named, bucket.buffer(), first=bucket.index() == 0, last=bucket.is_last())
