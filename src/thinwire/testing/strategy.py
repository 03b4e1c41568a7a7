"""The conformance suite of strategies."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..comm import Communicator, LocalWorld
from ..options import require_integer
from ..strategy import Attachment, Strategy
from .algorithm import check_algorithm
from .random import untouched_random_state

LEARNING_RATE = 0.005


class _Run(NamedTuple):
    """What a worker's run of training leaves.

    Attributes:
        parameters: of its model, after the strategy was detached.
        saved: the states of model, optimizer and attachment before some steps, by step.
        sent, received: bytes.
        num_skipped: steps that the attachment left out.
        differ: whether each worker has a model of its own.
    """

    parameters: list[Tensor]
    saved: dict[int, Any]
    sent: int
    received: int
    num_skipped: int
    differ: bool


def check_strategy(
    strategy: Strategy[Any], sizes: tuple[int, ...] = (1, 2, 4), steps: int = 8, named: bool = True
) -> None:
    """Check that a strategy fulfils the contract of `thinwire.strategy.strategy`, at work on a small model under SGD.

    `attach` returns an `Attachment`, and workers with different strategies fail together. The models of workers that train on
    different data are closer than without the strategy, and have the same bits if each worker has no model of its own; all
    parameters are finite. The ledgers of all workers count as many bytes sent as received. A repeated run has the same bits,
    and so has one that goes on from what was saved in the middle; saving changes nothing. Under `on_nonfinite="skip"` a NaN in
    the gradients of one worker reaches no model and is counted, and under "raise" it is an error. After `detach` nothing
    is sent, backward gives a worker's own gradient, and the model may be attached again. No global random state is changed.

    Strategies whose workers wait for no round, such as `Asynchronous` or `Local` with a quorum, are neither repeated nor saved
    in the middle: their bits depend on time. Under a quorum a worker hangs up alone, and what others send to it meanwhile is
    not received.

    Args:
        strategy: the strategy to check; its `attach` takes the communicator of a `LocalWorld`.
        sizes: numbers of workers that it can connect.
        steps: of the optimizer in a run, at least 5; enough for a round of the strategy.
        named: whether `parse(repr(strategy))` must equal it.

    Raises:
        AssertionError: the strategy breaks the contract.
        ValueError: too few steps.

    Example:
        >>> import thinwire as tw
        >>> from thinwire.testing import check_strategy
        >>> check_strategy(tw.Local(tw.Mean(tw.QSGD(bits=4)), every=4), sizes=(2,))
    """
    check_algorithm(strategy, Strategy, named)
    require_integer("check_strategy: steps", steps, 5)
    model = _model()
    with untouched_random_state(strategy), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # what a step that is skipped gives
        for size in sizes:
            _check_size(strategy, LocalWorld(size), model, steps)


def _check_size(strategy: Strategy[Any], world: LocalWorld, model: nn.Module, steps: int) -> None:
    where = f"{strategy}, {world.size} workers"
    # Two places, so that one of them lies between two rounds of many strategies.
    places = (steps // 2 - 1, steps // 2) if _has_fixed_order(strategy) else ()
    plain: list[_Run] = world.run(_trained, strategy, model, range(steps), places)
    for rank, run in enumerate(plain):
        assert all(bool(p.isfinite().all()) for p in run.parameters), (
            f"{where}: a parameter of rank {rank} is not finite"
        )
    sent, received = sum(run.sent for run in plain), sum(run.received for run in plain)
    # Workers that count commits hang up alone, and what others send them meanwhile is lost.
    is_counted = sent >= received if _counts_commits(strategy) else sent == received
    assert is_counted, f"{where}: the ledgers count {sent} bytes sent and {received} received"
    assert sent > 0 or world.size == 1, f"{where}: the ledgers count no bytes in {steps} steps; give more steps"
    if not plain[0].differ:
        for rank, run in enumerate(plain):
            is_equal = all(map(torch.equal, run.parameters, plain[0].parameters))
            assert is_equal, f"{where}: the model of rank {rank} has other bits than that of rank 0"
    alone: list[_Run] = world.run(_trained, None, model, range(steps), ())
    apart, without = _spread(plain), _spread(alone)
    assert world.size == 1 or apart < without, (
        f"{where}: after {steps} steps models are {apart:.3g} from their mean, and {without:.3g} without the strategy"
    )
    if places:
        again: list[_Run] = world.run(_trained, strategy, model, range(steps), ())
        _require_same(f"{where}: a second run, which saves nothing,", again, plain)
        for place in places:
            saved = [run.saved[place] for run in plain]
            resumed: list[_Run] = world.run(_trained, strategy, model, range(place, steps), (), saved)
            _require_same(f"{where}: a run that goes on before step {place}", resumed, plain)
    _check_nonfinite(where, strategy, world, model, steps)
    refused: list[bool] = world.run(_disagreeing, strategy, model)
    assert world.size == 1 or all(refused), (
        f"{where}: rank {refused.index(False)} accepts workers with other strategies"
    )
    world.run(_detached, strategy, model, steps)


def _check_nonfinite(where: str, strategy: Strategy[Any], world: LocalWorld, model: nn.Module, steps: int) -> None:
    """Check what follows from a NaN in the gradients of the last worker."""
    skipping = replace(strategy, on_nonfinite="skip")
    skipped: list[_Run] = world.run(_trained, skipping, model, range(steps), (), None, 1)
    for rank, run in enumerate(skipped):
        is_finite = all(bool(p.isfinite().all()) for p in run.parameters)
        assert is_finite, f"{where}: a NaN in a gradient of rank {world.size - 1} reached the model of rank {rank}"
    averager = getattr(strategy, "averager", None)
    if averager is not None and averager.traits.leaves_out_nonfinite:
        return  # the step may go on without that worker
    assert skipped[-1].num_skipped == 1, (
        f"{where}: one step was not finite, and num_skipped is {skipped[-1].num_skipped}"
    )
    try:
        world.run(_trained, replace(strategy, on_nonfinite="raise"), model, range(steps), (), None, 1)
    except FloatingPointError:
        return
    raise AssertionError(f'{where}: under on_nonfinite="raise" a step that is not finite is no error')


def _trained(
    comm: Communicator,
    strategy: Strategy[Any] | None,
    prototype: nn.Module,
    steps: range,
    places: tuple[int, ...],
    resumed: list[Any] | None = None,
    nan_at: int | None = None,
) -> _Run:
    """A worker trains.

    Args:
        comm: of this worker.
        strategy: None for none.
        prototype: the model before the first step.
        steps: to train.
        places: the steps before which states are saved.
        resumed: for each rank the states to go on from; None to begin.
        nan_at: the step in which a gradient of the last rank is NaN; None for none.
    """
    model = copy.deepcopy(prototype)
    optimizer = _optimizer(model)
    handle = None if strategy is None else _attached(strategy, model, optimizer, comm)
    parts: list[Any] = [part for part in (model, optimizer, handle) if part is not None]
    if resumed is not None:
        for part, state in zip(parts, copy.deepcopy(resumed[comm.rank]), strict=True):
            part.load_state_dict(state)
    saved = {}
    for step in steps:
        if step in places:
            saved[step] = copy.deepcopy([part.state_dict() for part in parts])
        loss = _loss(model, comm.rank, step)
        optimizer.zero_grad()
        (loss * float("nan") if step == nan_at and comm.rank == comm.size - 1 else loss).backward()
        optimizer.step()
    if handle is not None:
        handle.detach()
    parameters = [p.detach().clone() for p in model.parameters()]
    sent, received = (0, 0) if handle is None else (handle.ledger.bytes_sent, handle.ledger.bytes_received)
    num_skipped, differ = (0, True) if handle is None else (handle.num_skipped, getattr(handle, "models_differ", True))
    return _Run(parameters, saved, sent, received, num_skipped, differ)


def _attached(strategy: Strategy[Any], model: nn.Module, optimizer: Any, comm: Communicator) -> Attachment:
    handle = strategy.attach(model, optimizer, comm=comm, seed=5)
    assert isinstance(handle, Attachment), f"{strategy}: attach returns an Attachment, got {type(handle).__name__}"
    return handle


def _disagreeing(comm: Communicator, strategy: Strategy[Any], prototype: nn.Module) -> bool:
    """Whether the strategy refuses to attach where workers have different ones."""
    own, model = replace(strategy, max_nonfinite=strategy.max_nonfinite + comm.rank), copy.deepcopy(prototype)
    try:
        handle = _attached(own, model, _optimizer(model), comm)
    except ValueError:
        return True
    handle.detach()
    return False


def _detached(comm: Communicator, strategy: Strategy[Any], prototype: nn.Module, steps: int) -> None:
    """After `detach` a worker trains alone, and may attach again."""
    model, other = copy.deepcopy(prototype), copy.deepcopy(prototype)
    optimizer = _optimizer(model)
    handle = _attached(strategy, model, optimizer, comm)
    handle.detach()
    handle.detach()  # does nothing
    sent = handle.ledger.bytes_sent
    for step in range(steps):
        optimizer.zero_grad()
        _loss(model, comm.rank, step).backward()
        if step == 0:
            _loss(other, comm.rank, step).backward()
            pairs = zip(model.named_parameters(), other.parameters(), strict=True)
            changed = [name for (name, p), q in pairs if not _equal(p.grad, q.grad)]
            assert not changed, f"{strategy}: after detach the gradient of {changed[0]!r} is not the worker's own"
        optimizer.step()
    more = handle.ledger.bytes_sent - sent
    assert more == 0, f"{strategy}: {more} bytes were sent in {steps} steps after detach"
    comm.barrier()
    _attached(strategy, model, optimizer, comm).detach()


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def _has_fixed_order(strategy: Strategy[Any]) -> bool:
    """Whether workers exchange messages in rounds that all of them wait for."""
    averager = getattr(strategy, "averager", None)
    return not _counts_commits(strategy) and (averager is None or averager.traits.has_rounds)


def _counts_commits(strategy: Strategy[Any]) -> bool:
    return bool(getattr(strategy, "counts_commits", False))


def _require_same(what: str, runs: list[_Run], plain: list[_Run]) -> None:
    for rank, (run, other) in enumerate(zip(runs, plain, strict=True)):
        is_equal = all(map(torch.equal, run.parameters, other.parameters))
        assert is_equal, f"{what} ends with other bits on rank {rank}"


def _spread(runs: list[_Run]) -> float:
    """How far models are from their mean, in the norm over all workers."""
    models = torch.stack([torch.cat([p.flatten() for p in run.parameters]) for run in runs])
    return float((models - models.mean(0)).norm())


class _Model(nn.Module):
    """Parameters of several shapes: a scalar, and a layer that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.still = nn.Linear(6, 8), nn.Linear(8, 8, bias=False)
        self.convolution, self.last = nn.Conv1d(2, 3, 3), nn.Linear(6, 2)
        self.scale = nn.Parameter(torch.ones((), device="cpu"))
        self.still.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        inside = torch.tanh(self.first(x)) * self.scale
        inside = self.convolution((inside + self.still(inside)).unflatten(1, (2, 4)))
        result: Tensor = self.last(inside.flatten(1))
        return result


def _model() -> nn.Module:
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        return _Model()


def _loss(model: nn.Module, rank: int, step: int) -> Tensor:
    """On examples of this worker and step alone, and a target of this worker, so that workers drift apart."""
    target = torch.randn(2, generator=torch.Generator().manual_seed(rank), device="cpu")
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * (step + 1) + rank), device="cpu")
    loss: Tensor = (model(x) - target).square().sum()
    return loss
