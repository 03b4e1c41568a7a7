"""The public calls for gradients: `compress_gradients`, and `gradient_hook` for trainers that wrap models in DDP.

`gradient_compression.py` has the strategy, `gradient_rounds.py` what happens in a backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..average.base import Averager
from ..comm import Communicator, Group
from .gradient_compression import GradientCompression, ddp_hook
from .models import refuse_ddp


def compress_gradients(
    model: nn.Module,
    averager: Averager,
    *,
    comm: Communicator | None = None,
    replicas: Group | None = None,
    scaler: Any = None,
    seed: int = 0,
    bucket_bytes: int = 10 * 2**20,
    on_nonfinite: str = "skip",
    max_nonfinite: int = 100,
) -> GradientCompression:
    """Average the gradients of `model` over all workers with `averager`, during every backward pass.

    Add one line to an ordinary training loop. When `loss.backward()` returns, `param.grad` holds the averaged gradient,
    with the same bits on every worker. Frozen parameters take no part.

    A model in `DistributedDataParallel` keeps its buckets; `no_sync`, `find_unused_parameters`, `static_graph` and
    `gradient_as_bucket_view` work as usual. A plain module gets our own buckets, and its parameters and buffers are first
    made equal to rank 0's. A parameter without a gradient counts as zero, and receives the average like all others.

    Of a model under `fully_shard(model, mesh=mesh["shard"])` each worker averages the shards of its gradients with those of
    the other replicas, `replicas=mesh["replicate"]`: HSDP with a thin wire between replicas. Memory has the size of a shard.

    Args:
        model: a `DistributedDataParallel` model without another communication hook, or any module.
        averager: such as `Mean(TopK(0.01), ErrorFeedback())`.
        comm: how to communicate; by default a new process group, over DDP's workers or over all.
        replicas: which workers hold replicas, as a process group or one dimension of a mesh; None for all. A model under
            `fully_shard(model, mesh=mesh["shard"])` needs `replicas=mesh["replicate"]`; see "Sharded models" in the guide.
        scaler: the `torch.amp.GradScaler` in use, so that memory stays in unscaled units.
        seed: seed of the codec's random numbers; the same on all workers.
        bucket_bytes: size of the buckets of a plain module, before encoding; smaller => sending starts earlier, with more
            messages.
        on_nonfinite: what to do if the averaged gradient is infinite or NaN, which all workers see together. "skip": no
            optimizer updates these parameters, and memory stays as it was. "raise": backward raises. "apply": nothing.
        max_nonfinite: with "skip", this many such backward passes in a row raise a FloatingPointError.

    Returns:
        A handle with `ledger`, `seconds`, `num_skipped`, `no_sync`, `set_epoch`, `check_optimizer`, `state_dict`,
        `load_state_dict` and `detach`; also a context manager that detaches at its end.

    Raises:
        ValueError: a parameter takes part in another strategy, the model is on the meta device, or it is sharded
            without `replicas`. On all workers together: averagers, tensor shapes, their order, the layouts of shards or
            `bucket_bytes` differ. In backward and in the
            optimizer's step: a parameter was added, replaced or unfrozen.
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
    strategy = GradientCompression(model, averager, comm, scaler, seed, on_nonfinite, max_nonfinite, replicas)
    strategy.attach(bucket_bytes)
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
    """The same as a `(state, hook)` pair of DDP, for trainers that wrap the model in DDP themselves.

    Lightning takes it as `DDPStrategy(ddp_comm_state=state, ddp_comm_hook=hook)`. After Accelerate's `prepare`, call
    `model.register_comm_hook(state, hook)`. It may be built before the process group exists: the first bucket connects the
    workers and compares their configurations. If the trainer does not register the hook, no bucket arrives, and a warning
    says so when the state is detached or the process ends.

    Args:
        model: the module itself, before it is wrapped.
        averager, scaler, seed, on_nonfinite, max_nonfinite: as in `compress_gradients`.

    Returns:
        The state, which is what `compress_gradients` returns, and the hook.
    """
    refuse_ddp(GradientCompression.call, model)
    strategy = GradientCompression(model, averager, None, scaler, seed, on_nonfinite, max_nonfinite)
    strategy.expect_buckets()
    return strategy, ddp_hook
