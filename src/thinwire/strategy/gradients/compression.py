"""The strategy for gradients: average them while the backward pass still runs.

`gradients.py` has the configuration. This module attaches it to a model: to one in `DistributedDataParallel` through its
communication hook, or to a plain module through our own buckets and hooks (`buckets.py`).
`rounds.py` describes a backward pass.

Before each step of an optimizer over these parameters, a hook checks that all trainable parameters take part and that
momentum is applied once. If the round was not finite, it removes the gradients, so that nothing is updated.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, finalize, ref

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ...algorithm import require, required
from ...average.base import Averager, NamedTensors
from ...average.mean.mean import Mean
from ...codec import Codec
from ...comm import Communicator
from ...comm.compare import differing_by_name
from ...membership import check_state
from ...memory import MomentumCorrection
from ..base import AveragerAttachment
from ..model.ddp import DdpRefusal, unwrapped
from ..model.mean_model import holding_mean
from ..model.models import kind_of, make_equal, require_steps_on, trainable, values_of
from ..model.optimizer_state import options_and_state
from ..model.optimizer_step import Arguments, once_gradients_are_there
from ..model.shards import is_sharded
from ..strategy import Runtime
from .buckets import BUCKET_BYTES, GradientBuckets
from .dgc_sgd import check_optimizer
from .rounds import GradientRounds

if TYPE_CHECKING:
    from .gradients import Gradients


class GradientCompression(AveragerAttachment):
    """What `Gradients` attaches, and the state of `gradient_hook`.

    The phases of `seconds` are compensate, encode, exchange, wait and decode. Waiting and decoding run beside the backward
    pass; "blocked" is how long backward waited for them at its end.

    A plain module works as before once it is detached; its gradients stay local. DDP cannot remove a hook, so a detached DDP
    model raises an error in its next backward: attach again before it, or wrap the module anew.

    Args:
        strategy: the configuration.
        model: a module, or one in DDP.
        runtime: without a communicator and replicas, the workers are those of DDP, or all.
        optimizer: one that will step on the model, to check before the first step.
    """

    call = "Gradients"
    phases_in_step = ("compensate", "encode", "exchange", "blocked")
    """Waiting and decoding run beside the backward pass, which is "blocked" at its end."""
    strategy: Gradients
    averager: Averager

    def __init__(self, strategy: Gradients, model: nn.Module, runtime: Runtime, optimizer: Optimizer | None = None):
        ddp, module = unwrapped(self.call, model, runtime.comm, runtime.replicas)
        self._ignored = () if ddp is None else ddp.parameters_to_ignore
        super().__init__(strategy, module, trainable(module, self._ignored), runtime)
        self._names = {id(p): name for name, p in self.parameters}
        self._sharded = {name for name, p in self.parameters if is_sharded(p)}
        self._kinds = {name: kind_of(p) for name, p in self.parameters}
        # DDP holds this object in C++, where the garbage collector sees no cycle of references.
        self._ddp = None if ddp is None else ref(ddp)
        self._buckets: GradientBuckets | None = None
        self._rounds: GradientRounds | None = None
        self._saved: tuple[dict[str, Any], tuple[int, int]] | None = None
        self._num_backward = 0
        self._num_at_step: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._warn_unused: finalize[..., GradientCompression] | None = None
        require(
            ddp is None or strategy.bucket_bytes is None,
            f"{self.call}: bucket_bytes={strategy.bucket_bytes} is for plain modules, and DistributedDataParallel has buckets "
            "of its own; give it bucket_cap_mb",
        )
        self._require_same_forward(module)
        if optimizer is not None:
            require_steps_on(self.call, optimizer, module)
            self.check_optimizer(optimizer)
        self._given = optimizer

    def _require_same_forward(self, module: nn.Module) -> None:
        """Raise a ValueError if a forward pass changes parameters, each worker's by its own batch."""
        for name, part in module.named_modules():
            if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and id(part.weight) in self._names:
                require(
                    part.max_norm is None,
                    f"{self.call}: {name or 'the model'!r} has max_norm={part.max_norm}, by which a forward pass rescales the "
                    "rows that its batch has, so that workers' models would drift apart; leave max_norm out, and rescale all "
                    "rows after optimizer.step(): weight.data.renorm_(2, 0, max_norm)",
                )

    @property
    def codec(self) -> Codec | None:
        """The codec of the next round; `handle.codec.levels` are the levels that ALQ or AMQ has learned so far."""
        return self.averager.current_codec(self._state)

    @contextmanager
    def average_model(self, comm: Communicator | None = None) -> Iterator[None]:
        """Context in which buffers (running statistics) hold their mean over all workers; parameters are equal anyway.

        All workers enter it together.

        Args:
            comm: how to average; by default the strategy's communicator, whose ledger then counts it.
        """
        with holding_mean([], 1.0, list(self._model.buffers()), comm or self.comm):
            yield

    def no_sync(self) -> AbstractContextManager[None]:
        """Context in which backward only accumulates; the first backward after it averages the sum."""
        if self._ddp is not None:
            return required(self._ddp(), f"{self.call}: the model in DDP exists no more").no_sync()
        mistake = "this model is in DistributedDataParallel: call no_sync() of the DDP model instead"
        return required(self._buckets, mistake).no_sync()

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Check that momentum is applied once: by the averager, as in `tw.dgc`, or by the optimizer.

        Each step of an optimizer over these parameters checks it too; this call checks before the first step.

        Raises:
            ValueError: both apply momentum, or `DGCSGD` has another factor for weight decay than the averager.
        """
        if self.averager.traits.has_momentum:
            memory = self.averager.memory if isinstance(self.averager, Mean) else None
            factor = memory.momentum if isinstance(memory, MomentumCorrection) else None
            check_optimizer(optimizer, [p for _, p in self.parameters], factor)

    def load_state_dict(self, saved: dict[str, Any], among: tuple[int, int] = (0, 1)) -> None:
        """Restore what this worker's `state_dict` returned: now, or as soon as the first bucket connects the workers.

        The states of all workers together, in one dictionary, go on on another number of workers; see `AveragerAttachment`.

        Raises:
            ValueError: a state is missing, or of another worker or another configuration.
        """
        if self._state is None:
            self._saved = saved, among
        else:
            super().load_state_dict(saved, among)

    # ---- attaching ----

    def _ready(self) -> None:
        """Connect the workers, unless the first bucket has done so; all workers call this."""
        if self._state is None:
            with self._attaching() as comm:
                self._begin(comm)

    def _in_common(self, comm: Communicator) -> dict[str, Any]:
        """Equal gradients keep models equal only under equal optimizers. In elastic runs a joiner gets the state of others."""
        given, self._given = self._given, None  # DDP may keep this object for long
        return {} if given is None or comm.is_elastic else options_and_state(given)

    def _begin(self, comm: Communicator) -> None:
        state = self.averager.init(self._tensors(), comm, self._seed)
        self.averager.check_names([name for name, _ in self._tensors()], comm.rank)
        self._record = self._state = check_state(state, self.averager)
        self._begin_rounds(self.averager)
        self._rounds = GradientRounds(
            self.averager,
            self._state,
            comm,
            self._scaler,
            self._nonfinite,
            self._shards,
            self._transaction,
            # Each worker's DDP makes buckets of its own, and a worker that joins has not rebuilt them yet.
            order={name: i for i, (name, _) in enumerate(self.parameters)} if self._ddp and comm.is_elastic else None,
        )
        self._rounds.compare_models = self._compare_models
        if self._saved is not None:
            self.load_state_dict(*self._saved)
            self._saved = None

    def attach(self) -> None:
        """Connect the workers, and set the hooks of DDP or of a plain module."""
        if self._ddp is None:
            self._attach_plain()
        else:
            self._attach_ddp(required(self._ddp(), f"{self.call}: the model in DDP exists no more"))

    def _attach_ddp(self, ddp: DistributedDataParallel) -> None:
        with self._attaching(ddp.process_group) as comm:
            self._begin(comm)
            if ddp in _users:
                _users[ddp].compression = self  # the one before was detached, else a parameter would take part twice
                return
            user = HookUser(self)
            try:
                ddp.register_comm_hook(user, ddp_hook)
            except RuntimeError as error:
                raise ValueError(
                    f"{self.call}: this DistributedDataParallel has a communication hook already, yours or that of its "
                    "mixed_precision; wrap the module in DDP anew, without it (torch.autocast needs none)"
                ) from error
            _users[ddp] = user

    def _attach_plain(self) -> None:
        with self._attaching() as comm:
            # DDP has made its model equal itself.
            make_equal(self._model, comm)
            self._begin(comm)
            self._on_detach(DdpRefusal(self.call, self.parameters).end)
            bucket_bytes = self.strategy.bucket_bytes or BUCKET_BYTES
            self._buckets = GradientBuckets(self.parameters, self._launch, bucket_bytes, self._shards.gathered())
            assert self._rounds is not None, "`_begin` makes it"
            self._rounds.rest = self._buckets.rest
            self._on_detach(self._buckets.remove)

    # ---- at work ----

    def _launch(self, tensors: NamedTensors, buffer: Tensor, first: bool, last: bool) -> torch.futures.Future[Tensor]:
        if self._warn_unused is not None:
            self._warn_unused.detach()
        self._ready()  # `gradient_hook` is built before the workers can be connected
        assert self._rounds is not None
        require(not self.is_detached, f"{self.call} was detached from this model; wrap the module in DDP anew")
        if first:
            self._num_backward += 1
            self._check_unchanged()
        return self._rounds.launch([(name, values_of(g)) for name, g in tensors], buffer, first, last)

    def _compare_models(self) -> None:
        if names := [*differing_by_name(self.comm, dict(self._tensors()))]:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            self._advisor.say_once(
                f"{self.call}: the workers' models are not equal, although all get the same gradients: {names[0]!r}{more}; "
                "freeze, load and change parameters alike on all workers"
            )

    def _before_optimizer_step(self, optimizer: Optimizer, arguments: Arguments) -> Arguments:
        self._check_unchanged()
        self.check_optimizer(optimizer)
        return once_gradients_are_there(arguments, lambda: self._look_at_gradients(optimizer))

    def _look_at_gradients(self, optimizer: Optimizer) -> None:
        """Warn of gradients that nothing has averaged. Remove those of a step that is skipped.

        So optimizers leave parameters, momentum and step counts as they are.
        """
        before, self._num_at_step[optimizer] = self._num_at_step.get(optimizer, 0), self._num_backward
        has_own = before == self._num_backward and self.comm.size > 1
        skips = self._rounds is not None and self._rounds.skips
        if not (has_own or skips):
            return
        held = [p for group in optimizer.param_groups for p in group["params"] if id(p) in self._names]
        if has_own and any(p.grad is not None for p in held):
            self._advisor.say_once(
                f"{self.call}: {type(optimizer).__name__} steps, and no backward pass has averaged since its last step; "
                "gradients of no_sync() alone, of torch.autograd.grad or set by hand are each worker's own, so that models "
                "drift apart"
            )
        if skips:
            for p in held:
                p.grad = None

    def _check_unchanged(self) -> None:
        """Raise a ValueError if a trainable parameter does not take part, or has changed its kind."""
        # This runs twice in every step, so messages are built only when they are raised.
        for name, p in self._model.named_parameters():
            if p.requires_grad and id(p) not in self._names and name not in self._ignored:
                if name in self._sharded and not is_sharded(p):
                    continue  # FSDP has gathered it for this backward pass
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
        if self._buckets is not None:
            self._buckets.require_hooks()

    def expect_buckets(self) -> None:
        """Warn if no bucket has come when the strategy is detached, or when the process ends."""
        text = "gradient_hook: the hook never got a bucket, so it averaged nothing; register it with the DDP model"
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

    def _averaged(self) -> list[tuple[Any, NamedTensors]]:
        return [(self._state, self._tensors())]

    def _tensors(self) -> NamedTensors:
        return [(name, values_of(p)) for name, p in self.parameters]


@dataclass
class HookUser:
    """Who uses the hook of a DDP model, which takes one hook for good: the strategy that was attached last."""

    compression: GradientCompression


_users: WeakKeyDictionary[DistributedDataParallel, HookUser] = WeakKeyDictionary()


def ddp_hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations and cannot read postponed ones
    """The hook that DDP calls with each bucket when its gradients are complete."""
    state = state.compression if isinstance(state, HookUser) else state
    names = [state._names[id(p)] for p in bucket.parameters()]
    require(
        not bucket.buffer().is_sparse,
        f"the gradient of {names[0]!r} is sparse; build its embedding with sparse=False",
    )
    named = list(zip(names, bucket.gradients(), strict=True))
    return state._launch(named, bucket.buffer(), first=bucket.index() == 0, last=bucket.is_last())
