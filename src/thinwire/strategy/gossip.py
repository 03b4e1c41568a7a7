"""The strategy for parameters: workers gossip about their models, while each steps on gradients of its own.

`gossip_parameters` checks that options and workers fit together and makes models equal; what happens in a step of training
stands in `gossip_steps.py`, what happens in a round in `rounds.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..algorithm import require
from ..average.base import Averager, NamedTensors
from ..average.gossip_base import Gossip
from ..average.mean import Mean
from ..average.pairwise import Pairwise
from ..comm import Communicator, ProcessGroupCommunicator
from .asynchronous import AsynchronousGossip, gossip_asynchronously
from .gossip_steps import ORDERS, ParameterGossip
from .models import make_equal, updated_by
from .rounds import ParameterRounds


def gossip_parameters(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    averager: Averager | Pairwise,
    *,
    comm: Communicator | None = None,
    overlap: bool = False,
    staleness: int = 0,
    order: str = "combine_then_adapt",
    scaler: Any = None,
    seed: int = 0,
) -> ParameterGossip | AsynchronousGossip:
    """Average the parameters of `model` with those of neighbours, one round in every `optimizer.step()`.

    One line is added to an ordinary training loop. Every worker keeps a model of its own, z_i, and with g the gradient there

        combine_then_adapt:   x_i <- sum_j P_ij x_j, then the optimizer's update with g(z_i)         (D-PSGD)
        adapt_then_combine:   the optimizer's update with g(z_i), then x_i <- sum_j P_ij x_j         (SGP, CHOCO-SGD)

    where the averager says what mixing is, and z = x but for push-sum, where z = x / w: the optimizer updates x, and the
    model holds z at all other times. Optimizer states (momentum) stay each worker's own.

    With `overlap`, a round begins at the end of `optimizer.step()` and its messages fly during the next forward and
    backward pass, while a thread sleeps until they come; what they change is added `staleness` updates after that:

        combine_then_adapt:   x(t+1) = x(t) + [mixed - x](t - staleness) + update;  0 => the same bits as without overlap
        adapt_then_combine:   staleness must be 1 or more, for the update comes first

    One round is in flight at a time, so that with staleness s there is one in every s + 1 steps (every s steps).

    What takes part: the parameters that are trainable and the optimizer's; frozen ones do not, nor do those of other
    optimizers, which may have a call of their own. Parameters and buffers are first made equal to rank 0's. Buffers (running
    statistics) then stay each worker's own; only `average_model()` averages them.

    All workers must step equally often. Where a loss scaler skips a step on one of them, pass it as `scaler`: that worker
    takes part in the round without an update of its own. Otherwise it would be a round late from then on, and its
    neighbours would wait for the last round in vain, until the communicator's timeout raises a `CommunicationError`.

    Args:
        model: any module.
        optimizer: any `torch.optim` optimizer over parameters of `model`, with or without a closure.
        averager: any gossip averager, such as `Choco(Ring(), TopK(0.01))`; `Mean()`, uncompressed and without overlap; or
            `Pairwise()`, which has no rounds: a thread averages with one worker after another while training goes on, and
            no worker waits for another (AD-PSGD; see `gossip_asynchronously`). The four options are about rounds.
        comm: how to communicate; by default a process group of its own over all workers.
        overlap: let messages fly while the training goes on.
        staleness: updates that a round may miss; higher => slower networks are hidden, rounds are fewer and later.
        order: "combine_then_adapt" or "adapt_then_combine".
        scaler: the `torch.amp.GradScaler` in use.
        seed: of the averager's random numbers; the same on all workers.

    Returns:
        A handle with `consensus_distance`, `average_model`, `synchronize`, `ledger`, `seconds`, `set_epoch`, `state_dict`,
        `load_state_dict` and `detach`.

    Raises:
        ValueError: options that exclude each other; on all workers together, where averagers, options or the models' shapes
            differ between them.

    Source: Lian et al. 2017 (D-PSGD), arXiv 1705.09056; Assran et al. 2019 (SGP, Overlap SGP), arXiv 1811.10792;
    Lian et al. 2018 (AD-PSGD), arXiv 1710.06952.

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
    if isinstance(averager, Pairwise):
        late = overlap or staleness or order != ORDERS[0] or scaler is not None
        require(not late, f"{averager} has no rounds, so overlap, staleness, order and scaler mean nothing; leave them out")
        return gossip_asynchronously(model, optimizer, averager, comm, seed)
    _check_options(averager, overlap, staleness, order)
    parameters = _taking_part(model, optimizer)
    own_comm = ProcessGroupCommunicator() if comm is None else None
    comm = comm or own_comm
    shapes = {name: f"{tuple(t.shape)} {t.dtype}" for name, t in [*model.named_parameters(), *model.named_buffers()]}
    options = {"overlap": overlap, "staleness": staleness, "order": order, "parameters": [name for name, _ in parameters]}
    comm.check_agreement({"averager": averager} | options | shapes)
    make_equal(model, comm)
    gossip = ParameterGossip(
        model, optimizer, ParameterRounds(parameters, averager, comm, seed), overlap, staleness, order
    )
    if scaler is not None:
        gossip.watch(scaler)
    if own_comm is not None:
        gossip.closes(own_comm)
    return gossip


def _check_options(averager: Averager, overlap: bool, staleness: int, order: str) -> None:
    name = "gossip_parameters"
    is_plain_mean = isinstance(averager, Mean) and averager.codec.lossless and averager.memory is None
    require(
        isinstance(averager, Gossip) or is_plain_mean,
        f"{name}: {averager} compresses values themselves, which suits gradients, see compress_gradients; parameters need a "
        "gossip averager such as Choco(Ring(), TopK(0.01)), or plain Mean()",
    )
    require(order in ORDERS, f"{name}: order must be one of {', '.join(ORDERS)}, got {order!r}")
    require(
        isinstance(staleness, int) and staleness >= 0, f"{name}: staleness must be 0 or more, got {staleness!r}"
    )
    require(
        overlap or staleness == 0, f"{name}: staleness={staleness} needs overlap=True; otherwise a round is never late"
    )
    require(
        not overlap or isinstance(averager, Gossip),
        f"{name}: {averager} replaces parameters, and overlap needs an averager that adds to them, such as Mix(Complete())",
    )
    require(
        not overlap or order == ORDERS[0] or staleness >= 1,
        f"{name}: with order={order!r} and overlap, staleness must be 1 or more, or else use order={ORDERS[0]!r}",
    )


def _taking_part(model: nn.Module, optimizer: torch.optim.Optimizer) -> NamedTensors:
    """The trainable parameters of the model that the optimizer updates; it may update no others."""
    named = updated_by(optimizer, model)
    own = {id(p) for _, p in named}
    strangers = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and id(p) not in own]
    require(
        not strangers,
        f"gossip_parameters: {len(strangers)} of the optimizer's parameters are not the model's and would drift apart; put "
        "them into one module with it",
    )
    return named
