"""The strategy for parameter changes: workers train alone for H steps, and then average what they changed.

`local_updates` checks the options; `local_rounds.py` has the rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..algorithm import require
from ..average.base import Averager
from ..average.inverse_norm import InverseNorm
from ..average.outer_sgd import OuterSGD
from ..comm import Communicator, Group
from .fragments import Fragments
from .local_options import LocalOptions
from .local_rounds import LocalUpdates, OuterOptimizer


def local_updates(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    averager: Averager,
    every: int,
    outer: OuterOptimizer | None = None,
    *,
    fragments: Fragments = 1,
    delay: int = 0,
    alpha: float = 0.0,
    weights: InverseNorm | None = None,
    pull: float | None = None,
    state_every: Mapping[str, int] | None = None,
    comm: Communicator | None = None,
    scaler: Any = None,
    replicas: Group | None = None,
    on_nonfinite: str = "skip",
    max_nonfinite: int = 100,
    seed: int = 0,
) -> LocalUpdates:
    """Let workers train alone, and average their parameter changes every H optimizer steps.

        g = 1/W sum_i (anchor - x_i),   anchor <- outer(anchor, g),   x_i <- alpha x_i + (1 - alpha) anchor     (every H steps)

    With `outer=None`, anchor <- anchor - g: Local SGD, x_i <- 1/W sum_j x_j. With Nesterov SGD as the outer and AdamW as
    the inner optimizer: DiLoCo, see `diloco`. With a codec and memory in the averager, the changes are sent encoded, and the
    lost part is added to the next round's. With a gossip averager every worker applies its own g_i, then gossips once.

    Fragments. With P fragments, each is exchanged every H steps at an offset of its own, so that the largest exchange is 1/P of
    the model. With a delay of tau steps, messages fly while the training goes on: a thread encodes, waits and decodes, and the
    result is merged tau steps after the round began (Streaming DiLoCo).

    Add one line to an ordinary loop; rounds run inside `optimizer.step()`. All workers must take equally many steps. Where a
    loss scaler skips a step on one worker, pass it as `scaler`: that worker counts the step too. Otherwise the others wait
    for it until their time limit.

    Parameters are looked up in the model at each step, so `p.data = ...` is fine. Converting, replacing, adding or unfreezing
    parameters later is an error that names the parameter. float64 parameters have a float64 anchor; `Mix` and `PushSum` gossip
    it in float64, and other averagers send its changes as float32. Complex parameters count as pairs of real numbers.

    Bytes per worker and round of a fragment: those of the averager for the fragment's tensors. `ledger.mean_bytes_sent` is the
    mean of all steps, and `ledger.peak_bytes_sent` the most of one round.

    Args:
        model: any module that is not wrapped in `DistributedDataParallel`; its parameters and buffers are first made equal to
            rank 0's. Frozen parameters take no part.
        optimizer: the inner optimizer, over the model's parameters, or what Accelerate's `prepare` made of it; its state
            stays local, but for `state_every`.
        averager: such as `Mean()`, `Mean(TopK(0.01), ErrorFeedback())`, `PowerSGD()`, `Mix(Ring())`.
        every: H, steps of the optimizer between rounds; higher => fewer messages, workers drift further apart. A final partial
            period is averaged only by `synchronize`.
        outer: makes an optimizer over given parameters, the anchors, such as `OuterSGD()` or any `torch.optim` factory; or a
            scheduler of `torch.optim.lr_scheduler` with its optimizer, which steps every H steps. Under push-sum, where
            anchors are biased, it should not depend on the parameters' scale (weight decay).
        fragments: P, layer i belongs to fragment `i mod P`; or for each fragment a pattern of parameter names, or several.
        delay: tau, steps between the begin of a round and its merging, below H; higher => slower networks are hidden, changes
            come later. The messages of a fragment should need less time than tau steps.
        alpha: the share of the worker's own parameters in the merged ones, in [0, 1). With a delay, 0 drops the worker's own
            changes of the last tau steps; the published value is 0.5 for a delay of 5 of 100 steps.
        weights: `InverseNorm()` weighs changes by their norms and drops outliers (EDiT); None gives all the same weight.
        pull: gamma, with `Mix` only: workers mix both changes and anchors with their neighbours', and apply
            `mixed g + gamma (anchor - mixed anchor)`, so that anchors are pulled together and never replaced (NoLoCo).
        state_every: names of states of the inner optimizer, and after how many steps they are averaged over workers, dense,
            such as `{"exp_avg": 60, "exp_avg_sq": 120}` (DES-LOC). That costs 2 (W-1)/W 4n bytes each time.
        comm: how to communicate; by default a process group of its own over all workers.
        scaler: the `GradScaler` of the loss, if there is one.
        replicas: which workers hold replicas, as a process group or one dimension of a mesh; None for all. A model under
            `fully_shard(model, mesh=mesh["shard"])` needs `replicas=mesh["replicate"]`; see "Sharded models" in the guide.
        on_nonfinite: what a worker does if its own gradient is infinite or NaN in an inner step: "skip" that step, "raise" an
            error, or "apply" it, which loses the changes of the whole period.
        max_nonfinite: with "skip", how many such steps in a row are an error.
        seed: seed of the codec's random numbers; the same on all workers.

    Returns:
        A handle with `ledger`, `seconds`, `num_skipped`, `synchronize`, `set_epoch`, `state_dict`, `load_state_dict` and
        `detach`; also a context manager. `state_dict` waits for messages in flight, and saves them unmerged.

    Raises:
        ValueError: an option out of range, an averager without rounds, momentum in both averager and outer optimizer, a model
            in DDP, `weights` for a sharded model, parameters that share memory or belong to another strategy; on all workers
            together, where options, the outer optimizers, the averagers, the layouts of shards or the models' tensors differ.
        FloatingPointError: in `optimizer.step()`, as `on_nonfinite` says.

    Source: Stich 2018, Local SGD, arXiv 1805.09767; Douillard et al. 2023, DiLoCo, arXiv 2311.08105; Douillard et al. 2025,
        Streaming DiLoCo, arXiv 2501.18512; Cheng et al. 2024, EDiT, arXiv 2412.07210; Kolehmainen et al. 2025, NoLoCo,
        arXiv 2506.10911; Iacob et al. 2025, DES-LOC, arXiv 2505.22549.

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
    options = LocalOptions(every, fragments, delay, alpha, weights, pull, state_every or {})
    require(
        pull is None or averager.mixes_plainly,
        f"local_updates: pull mixes changes and anchors with those of neighbours, as Mix does, and {averager} does not; use "
        "Mix(RandomPairs()), or leave pull out",
    )
    require(
        weights is None or averager.gives_one_mean,
        f"local_updates: weights are for averagers with one mean, such as Mean(), got {averager}",
    )
    return LocalUpdates(
        model,
        optimizer,
        averager,
        options,
        OuterSGD(lr=1.0, momentum=0.0, nesterov=False) if outer is None else outer,
        comm=comm,
        scaler=scaler,
        on_nonfinite=on_nonfinite,
        max_nonfinite=max_nonfinite,
        seed=seed,
        replicas=replicas,
    )
