"""The strategy for parameter changes: workers train alone for H steps, and then average what they changed.

`local_updates` checks the options; `local_rounds.py` has the rounds.
"""

from __future__ import annotations

import torch
from torch import nn

from ..algorithm import require
from ..average.base import Averager
from ..comm import Communicator
from .local_rounds import LocalUpdates, OuterOptimizer, plain


def local_updates(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    averager: Averager,
    every: int,
    outer: OuterOptimizer | None = None,
    *,
    comm: Communicator | None = None,
    on_nonfinite: str = "skip",
    max_nonfinite: int = 100,
    seed: int = 0,
) -> LocalUpdates:
    """Let workers train alone, and average their parameter changes every H optimizer steps.

        g = 1/W sum_i (anchor - x_i),    anchor <- outer(anchor, g),    x_i <- anchor          (every H steps)

    With `outer=None`, anchor <- anchor - g: Local SGD, x_i <- 1/W sum_j x_j. With Nesterov SGD as the outer and AdamW as
    the inner optimizer: DiLoCo. With a codec and memory in the averager, the changes are sent encoded, and the lost part is
    added to the next round's. With a gossip averager every worker applies its own g_i, then gossips once.

    Add one line to an ordinary loop; rounds run inside `optimizer.step()`. All workers must take equally many steps. A worker
    that takes fewer, such as one whose loss scaler skips a step, keeps the others waiting until their time limit.

    Parameters are looked up in the model at each step, so `p.data = ...` is fine. Converting, replacing, adding or unfreezing
    parameters later is an error that names the parameter. float64 parameters have a float64 anchor; `Mix` and `PushSum` gossip
    it in float64, and other averagers send its changes as float32. Complex parameters count as pairs of real numbers.

    Args:
        model: any module that is not wrapped in `DistributedDataParallel`; its parameters and buffers are first made equal to
            rank 0's. Frozen parameters take no part.
        optimizer: the inner optimizer, over the model's parameters, or what Accelerate's `prepare` made of it; its state
            stays local.
        averager: such as `Mean()`, `Mean(TopK(0.01), ErrorFeedback())`, `PowerSGD()`, `Mix(Ring())`.
        every: H, steps of the optimizer between rounds; higher => fewer messages, workers drift further apart. A final partial
            period is averaged only by `synchronize`.
        outer: makes an optimizer over given parameters, the anchors; see above. Under push-sum, where anchors are biased, it
            should not depend on the parameters' scale (weight decay).
        comm: how to communicate; by default a process group of its own over all workers.
        on_nonfinite: what a worker does if its own gradient is infinite or NaN in an inner step: "skip" that step, "raise" an
            error, or "apply" it, which loses the changes of the whole period.
        max_nonfinite: with "skip", how many such steps in a row are an error.
        seed: seed of the codec's random numbers; the same on all workers.

    Returns:
        A handle with `ledger`, `seconds`, `num_skipped`, `synchronize`, `set_epoch`, `state_dict`, `load_state_dict` and
        `detach`; also a context manager.

    Raises:
        ValueError: `every` below 1, an averager without rounds, momentum in both averager and outer optimizer, a model in
            DDP or of DTensors, parameters that share memory or belong to another strategy; on all workers together, where
            `every`, the outer optimizers, the averagers or the models' tensors differ.
        FloatingPointError: in `optimizer.step()`, as `on_nonfinite` says.

    Source: Stich 2018, Local SGD, arXiv 1805.09767; Douillard et al. 2023, DiLoCo, arXiv 2311.08105.

    Example:
        >>> import torch, thinwire as tw
        >>> def worker(comm):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        ...     tw.local_updates(model, optimizer, tw.Mean(), every=2, comm=comm)
        ...     start = model.weight.item()
        ...     for _ in range(2):
        ...         model.weight.grad = torch.full((1, 1), float(comm.rank))
        ...         optimizer.step()
        ...     return round(start - model.weight.item(), 5)
        >>> tw.LocalWorld(2).run(worker)
        [1.0, 1.0]
    """
    require(
        isinstance(averager, Averager),
        f"local_updates: averager must be one that has rounds, such as Mean() or Mix(), got {averager!r}",
    )
    require(isinstance(every, int) and every >= 1, f"local_updates: every must be an integer, 1 or more, got {every!r}")
    return LocalUpdates(
        model,
        optimizer,
        averager,
        every,
        plain if outer is None else outer,
        comm=comm,
        on_nonfinite=on_nonfinite,
        max_nonfinite=max_nonfinite,
        seed=seed,
    )
