"""The strategy for gradients as data: `Gradients`, and `gradient_hook` for trainers that wrap models in DDP themselves.

`compression.py` attaches it, `rounds.py` has what happens in a backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...average.base import Averager
from ...comm import Communicator, Group
from ...comm.process_group import num_ranks
from ...options import require_integer
from ..advice import FOR_MUON, FOR_ONE, FOR_SEVERAL, is_muon, log_choice
from ..model.ddp import refuse_ddp, wrapped_ddp
from ..strategy import Averaging, Rhythm, Runtime
from ..told import attach_together
from .compression import GradientCompression, ddp_hook


def num_workers(model: nn.Module, comm: Communicator | None, replicas: Group | None) -> int | None:
    """How many workers will average the model's gradients, before they are connected; None where they come and go."""
    if comm is not None:
        return None if comm.is_elastic else comm.size
    ddp = wrapped_ddp(model)
    return num_ranks(replicas if ddp is None else ddp.process_group)


def default_averager(workers: int | None, optimizer: Optimizer | None = None) -> Averager:
    """What averages the gradients of a user who names no averager: unbiased, without memory, at least 3 times fewer bytes.

    A single worker sends nothing: it stays dense, as compression would cost it time and accuracy for nothing.
    4 bits reach dense training under SGD and AdamW. Muon gets 8 bits, by the exchange whose bytes do not grow with the number
    of workers. docs/first-lines.md has what both reached, and why the line does not count.

    Args:
        workers: their number; None where they come and go.
        optimizer: what steps on the gradients, where that is known.

    Example:
        >>> import torch
        >>> weights = [torch.zeros(2, 2)]
        >>> default_averager(4, torch.optim.AdamW(weights)), default_averager(4, torch.optim.Muon(weights))
        (Mean(QSGD(bits=4)), Mean(QSGD(bits=8), exchange='scatter_reduce'))
        >>> default_averager(1)
        Mean()
    """
    if workers == 1:
        return FOR_ONE
    if optimizer is not None and is_muon(optimizer):
        return FOR_MUON
    return FOR_SEVERAL


@dataclass(frozen=True, repr=False)
class Gradients(Averaging[GradientCompression]):
    """Average the gradients of a model over all workers, during every backward pass.

    When `loss.backward()` returns, `param.grad` holds the averaged gradient, with the same bits on every worker. Frozen
    parameters take no part.

    A model in `DistributedDataParallel` keeps its buckets; `no_sync`, `find_unused_parameters`, `static_graph` and
    `gradient_as_bucket_view` work as usual. A plain module gets our own buckets, and its parameters and buffers are first
    made equal to rank 0's. Optimizers are not, so options or states that differ are refused. A parameter without a gradient
    counts as zero, and receives the average like all others. One that all workers freeze later gets no gradient any more.

    A run that goes on from saved states has the bits of one that was not interrupted. With `exchange="sparse_reduce"` or
    `granularity="bucket"` that holds for plain modules: DDP arranges its buckets anew after its first step, and what these
    choose of a bucket changes with it.

    Gradients of every dtype are averaged in float32, and come back in their own dtype. So float64 gradients lose digits, and
    one above 3.4e38 counts as infinite.

    Of a model under `fully_shard(model, mesh=mesh["shard"])` each worker averages the shards of its gradients with those of
    the other replicas, `replicas=mesh["replicate"]`: HSDP with a thin wire between replicas. Memory has the size of a shard.

    Attached, it has `ledger`, `seconds`, `num_skipped`, `no_sync`, `set_epoch`, `check_optimizer`, `state_dict`,
    `load_state_dict` and `detach`. In backward and in the optimizer's step, a parameter that was added, replaced or unfrozen is
    a ValueError.

    Args:
        averager: one that gives all workers one mean, such as `Mean(TopK(0.01), ErrorFeedback())`.
        bucket_bytes: size of the buckets of a plain module, before encoding; smaller => sending starts earlier, with more
            messages. None is 10 MiB.
        on_nonfinite: what to do if the averaged gradient is infinite or NaN, which all workers see together. "skip": no
            optimizer updates these parameters, and memory stays as it was. "raise": backward raises a FloatingPointError, which
            names the first worker and parameter. "apply": nothing.
        max_nonfinite: with "skip", this many such backward passes in a row raise a FloatingPointError.

    Raises:
        ValueError: an averager of parameters, or a value out of range.

    Example:
        >>> import torch, thinwire as tw
        >>> strategy = tw.Gradients(tw.Mean(tw.QSGD(bits=8)))
        >>> strategy
        Gradients(Mean(QSGD(bits=8)))
        >>> def worker(comm):
        ...     model = torch.nn.Linear(2, 1, bias=False)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     with tw.attach(model, optimizer, strategy, comm=comm):
        ...         model(torch.full((1, 2), float(comm.rank))).sum().backward()
        ...     return model.weight.grad.tolist()
        >>> tw.LocalWorld(2).run(worker)
        [[[0.5, 0.5]], [[0.5, 0.5]]]
    """

    averager: Averager
    _: KW_ONLY
    bucket_bytes: int | None = None

    models_differ: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(
            self.averager.traits.gives_one_mean,
            f"{self.averager!r} moves tensors towards their neighbours', which suits parameters; gradients need an averager "
            "that gives all workers one mean, such as Mean or PowerSGD",
        )
        if self.bucket_bytes is not None:
            require_integer("Gradients: bucket_bytes", self.bucket_bytes, 1)

    @property
    def rhythm(self) -> Rhythm:
        """A round in every backward pass."""
        return Rhythm(in_backward=True)

    def _attached(self, model: nn.Module, optimizer: Optimizer | None, runtime: Runtime) -> GradientCompression:
        return attach_together(model, runtime, lambda: GradientCompression(self, model, runtime, optimizer))


def compress_gradients(
    model: nn.Module,
    averager: Averager | None = None,
    *,
    comm: Communicator | None = None,
    replicas: Group | None = None,
    scaler: Any = None,
    seed: int = 0,
    **options: Any,
) -> GradientCompression:
    """Attach `Gradients(averager, **options)` to a model; any optimizer may step on it. See `attach` for the arguments.

    Without an averager it takes `Mean(QSGD(bits=4))`, or `Mean()` for one worker, and says so. For Muon use
    `attach(model, optimizer)`, which takes 8 bits.

    Example:
        >>> import torch, thinwire as tw
        >>> def worker(comm):
        ...     with tw.compress_gradients(torch.nn.Linear(2, 1), tw.Mean(), comm=comm, bucket_bytes=2**20) as handle:
        ...         return handle.strategy
        >>> tw.LocalWorld(1).run(worker)
        [Gradients(Mean(), bucket_bytes=1048576)]
    """
    chosen = default_averager(num_workers(model, comm, replicas)) if averager is None else averager
    strategy = Gradients(chosen, **options)
    handle = strategy.attach(model, comm=comm, replicas=replicas, scaler=scaler, seed=seed)
    if averager is None:
        log_choice(strategy, handle.comm)
    return handle


def gradient_hook(
    model: nn.Module, averager: Averager, *, scaler: Any = None, seed: int = 0, **options: Any
) -> tuple[GradientCompression, Callable[[GradientCompression, Any], torch.futures.Future[Tensor]]]:
    """`Gradients(averager, **options)` as a `(state, hook)` pair of DDP, for trainers that wrap the model in DDP themselves.

    Lightning takes it as `DDPStrategy(ddp_comm_state=state, ddp_comm_hook=hook)`. After Accelerate's `prepare`, call
    `model.register_comm_hook(state, hook)`. It may be built before the process group exists: the first bucket connects the
    workers and compares their configurations. If the trainer does not register the hook, no bucket arrives, and a warning
    says so when the state is detached or the process ends.

    Args:
        model: the module itself, before it is wrapped.
        averager, options: of `Gradients`.
        scaler, seed: as in `attach`.

    Returns:
        The state, which is what `compress_gradients` returns, and the hook.

    Raises:
        ValueError: the model or a part of it is in DDP already, or does not suit the averager.
    """
    refuse_ddp(GradientCompression.call, model)
    strategy = GradientCompression(Gradients(averager, **options), model, Runtime(scaler=scaler, seed=seed))
    strategy.expect_buckets()
    return strategy, ddp_hook
