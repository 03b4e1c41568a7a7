"""The strategy for parameters: workers gossip about their models, and each steps on gradients of its own.

`gossip_parameters` checks the options. `gossip_steps.py` has the steps of the training, `rounds.py` the rounds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..algorithm import require
from ..average.base import Averager
from ..comm import Communicator, Group
from .gossip_steps import ORDERS, ParameterGossip


def gossip_parameters(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    averager: Averager,
    *,
    comm: Communicator | None = None,
    replicas: Group | None = None,
    overlap: bool = False,
    staleness: int = 0,
    order: str = "combine_then_adapt",
    scaler: Any = None,
    on_nonfinite: str = "skip",
    max_nonfinite: int = 100,
    seed: int = 0,
) -> ParameterGossip:
    """Average the parameters of `model` with those of neighbours, one round in every `optimizer.step()`.

    Add one line to an ordinary training loop. Every worker keeps a model z_i of its own. With g the gradient at z_i,

        combine_then_adapt:   x_i <- sum_j P_ij x_j, then the optimizer's update with g(z_i)         (D-PSGD)
        adapt_then_combine:   the optimizer's update with g(z_i), then x_i <- sum_j P_ij x_j         (SGP, CHOCO-SGD)

    where the averager defines the mixing, and z = x except under push-sum, where z = x / w. The optimizer updates x, and the
    model holds z at all other times. Optimizer states (momentum) stay local.

    Overlap. A round begins at the end of `optimizer.step()`. Its messages travel during the next forward and backward pass,
    and a thread waits for them. Its change is added `staleness` updates later:

        combine_then_adapt:   x(t+1) = x(t) + [mixed - x](t - staleness) + update;  staleness 0 => same bits as no overlap
        adapt_then_combine:   staleness must be 1 or more, because the update comes first

    One round is in flight at a time. So with staleness s there is one round in every s + 1 steps (in every s steps for
    adapt_then_combine).

    Who takes part. The trainable parameters that the optimizer updates. Frozen parameters and those of other optimizers do
    not; another optimizer may have a call of its own. Parameters and buffers are first made equal to rank 0's. Buffers
    (running statistics) then stay local; only `average_model()` averages them. Each round looks the parameters up in the model,
    so `p.data = ...` and `vector_to_parameters` are fine. Converting, replacing, adding or unfreezing parameters later is an
    error that names the parameter.

    Precision. `Mix` and `PushSum` average float64 parameters in float64. Averagers with a codec exchange float32 copies of them
    and add the float32 change to the float64 values. `Mean()` refuses them. Complex parameters count as pairs of real numbers.

    Steps. All workers must step equally often. Where a loss scaler skips a step on one worker, pass it as `scaler`: that worker
    takes part in the round without an update. Otherwise it would be one round late, and its neighbours would wait for its last
    round until the communicator's timeout raises a `CommunicationError`.

    Args:
        model: any module that is not wrapped in `DistributedDataParallel`.
        optimizer: any `torch.optim` optimizer over parameters of `model`, with or without a closure; or one that Accelerate's
            `prepare` returned.
        averager: any gossip averager, such as `Choco(Ring(), TopK(0.01))`; or `Mean()`, uncompressed and without overlap.
        comm: how to communicate; by default a process group of its own over all workers.
        replicas: which workers hold replicas, as a process group or one dimension of a mesh; None for all. A model under
            `fully_shard(model, mesh=mesh["shard"])` needs `replicas=mesh["replicate"]`; see "Sharded models" in the guide.
        overlap: whether messages travel while the training goes on.
        staleness: updates that a round may miss; higher => slower networks are hidden, rounds are fewer and later.
        order: "combine_then_adapt" or "adapt_then_combine".
        scaler: the `torch.amp.GradScaler` in use.
        on_nonfinite: what a worker does if its own gradient is infinite or NaN: "skip" its update and still average, "raise" an
            error, or "apply" it, which spreads to all workers.
        max_nonfinite: with "skip", how many such steps in a row are an error.
        seed: of the averager's random numbers; the same on all workers.

    Returns:
        A handle with `consensus_distance`, `average_model`, `synchronize`, `ledger`, `seconds`, `num_skipped`, `set_epoch`,
        `state_dict`, `load_state_dict` and `detach`; also a context manager.

    Raises:
        ValueError: options that exclude each other, a model in DDP, parameters that share memory or belong to another
            strategy, shards that do not correspond; on all workers together, where averagers, options or the models'
            tensors differ.
        FloatingPointError: in `optimizer.step()`, as `on_nonfinite` says.

    Source: Lian et al. 2017 (D-PSGD), arXiv 1705.09056; Assran et al. 2019 (SGP, Overlap SGP), arXiv 1811.10792.

    Example:
        >>> import torch, thinwire as tw
        >>> def worker(comm):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.zeros_(model.weight)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        ...     gossip = tw.gossip_parameters(model, optimizer, tw.Mix(), comm=comm, order="adapt_then_combine")
        ...     model(torch.tensor([[float(comm.rank)]])).sum().backward()
        ...     optimizer.step()
        ...     gossip.detach()
        ...     return model.weight.item()
        >>> tw.LocalWorld(2).run(worker)
        [-0.5, -0.5]
    """
    _check_options(averager, overlap, staleness, order)
    return ParameterGossip(
        model,
        optimizer,
        averager,
        comm=comm,
        overlap=overlap,
        staleness=staleness,
        order=order,
        scaler=scaler,
        on_nonfinite=on_nonfinite,
        max_nonfinite=max_nonfinite,
        seed=seed,
        replicas=replicas,
    )


def _check_options(averager: Averager, overlap: bool, staleness: int, order: str) -> None:
    name = "gossip_parameters"
    require(
        averager.has_rounds,
        f"{name}: {averager} has no rounds; call gossip_asynchronously(model, optimizer, {averager}) instead",
    )
    require(
        averager.suits_parameters,
        f"{name}: {averager} compresses values themselves, which suits gradients, see compress_gradients; parameters need a "
        "gossip averager such as Choco(Ring(), TopK(0.01)), or plain Mean()",
    )
    require(order in ORDERS, f"{name}: order must be one of {', '.join(ORDERS)}, got {order!r}")
    require(isinstance(staleness, int) and staleness >= 0, f"{name}: staleness must be 0 or more, got {staleness!r}")
    require(
        overlap or staleness == 0, f"{name}: staleness={staleness} needs overlap=True; otherwise a round is never late"
    )
    require(
        not overlap or not averager.gives_one_mean,
        f"{name}: {averager} replaces parameters, and overlap needs an averager that adds to them, such as Mix(Complete())",
    )
    require(
        not overlap or order == ORDERS[0] or staleness >= 1,
        f"{name}: with order={order!r} and overlap, staleness must be 1 or more, or else use order={ORDERS[0]!r}",
    )
