"""What strategies need of an optimizer's step: the optimizer that runs it, and its arguments."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch.optim import Optimizer

from ...algorithm import require, required

P = ParamSpec("P")
T = TypeVar("T")
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of `Optimizer.step` as its pre-hooks get and replace them; the first one is the optimizer."""


def stepping_optimizer(call: str, optimizer: Optimizer | None) -> Optimizer:
    """The optimizer whose `step` updates the parameters and runs hooks: the given one, or the one that Accelerate wrapped.

    Args:
        call: the name of the strategy that attaches to it; for the message.
        optimizer: what the user steps.

    Raises:
        ValueError: there is none, or it is another wrapper, which has no step hooks, or one that makes parameters equal itself.
    """
    given = required(optimizer, f"{call}: averaging follows the steps of an optimizer; give the model's")
    optimizer = unwrapped(given)
    require(
        not is_zero_redundancy(optimizer),
        f"{call}: ZeroRedundancyOptimizer sends every worker's share of the parameters to all others in each step, and here "
        "workers' models differ; pass a plain optimizer, or average gradients with compress_gradients",
    )
    require(
        "_optimizer_step_post_hooks" in vars(optimizer),
        f"{call}: {type(optimizer).__name__} has no step hooks, so no averaging would follow its steps; pass the "
        "torch.optim optimizer that it wraps, or call its base class's __init__",
    )
    return optimizer


def is_zero_redundancy(optimizer: Optimizer) -> bool:
    """Whether each worker steps on a share of the parameters, and sends it to all others."""
    library = sys.modules.get("torch.distributed.optim")  # no such optimizer exists unless somebody imported it
    return library is not None and isinstance(optimizer, library.ZeroRedundancyOptimizer)


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """The optimizer, or the one that Accelerate wrapped."""
    library = sys.modules.get("accelerate.optimizer")  # no wrapper of Accelerate exists unless somebody imported it
    if library is not None and isinstance(optimizer, library.AcceleratedOptimizer):
        return unwrapped(optimizer.optimizer)
    return optimizer


def makes_state_only() -> bool:
    """Whether the step under way only makes the optimizer's state: without gradients, at a learning rate of 0.

    `get_optimizer_state_dict` and `set_optimizer_state_dict` of `torch.distributed.checkpoint` take it where an optimizer has
    no state, such as plain SGD, or a worker's whose steps were all skipped so far. So workers may differ in it.
    """
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_name != "_init_optim_state":
        frame = frame.f_back
    return frame.f_code.co_name == "_init_optim_state"


def without_autocast(call: Callable[P, T]) -> Callable[P, T]:
    """The function for callers in `torch.autocast`, which would round products of matrices in it to half precision.

    Example:
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     without_autocast(torch.mm)(torch.ones(1, 1), torch.ones(1, 1)).dtype
        torch.float32
    """

    @functools.wraps(call)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        if not (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):
            return call(*args, **kwargs)  # in 0.5 microseconds, where the other way takes 5
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return call(*args, **kwargs)

    return called


def refuse_in_backward(call: str, optimizer: Optimizer) -> None:
    """Raise a ValueError if a backward pass is under way: its gradients are this worker's own still."""
    require(
        torch._C._current_graph_task_id() == -1,
        f"{call}: {type(optimizer).__name__} steps during the backward pass, such as from a hook of a gradient, before workers "
        "have averaged; step once backward has returned",
    )


def once_gradients_are_there(
    arguments: Arguments, act: Callable[[], None], *, before: Callable[[], None] = lambda: None
) -> Arguments:
    """Call `act` when the step's gradients are there: now, or after each call of the closure that computes them.

    Args:
        arguments: those of the step.
        act: what to do with the gradients.
        before: what to do before each call of the closure.

    Returns:
        The arguments for the step.
    """
    args, kwargs = arguments
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        act()
        return arguments

    def evaluate() -> Any:
        before()
        loss = closure()
        act()
        return loss

    others = {name: value for name, value in kwargs.items() if name != "closure"}
    return (args[0], evaluate, *args[2:]), others


class ScalerWatch:
    """Takes part in rounds also where `GradScaler.step` skips the optimizer's step. A scaler may step several optimizers.

    Args:
        scaler: the loss scaler; None watches nothing.
        optimizer: whose steps count.
        take_part: what the worker does in place of a step.
    """

    def __init__(self, scaler: Any, optimizer: Optimizer, take_part: Callable[[], None]):
        self.optimizer, self.take_part, self.has_stepped, self._scaler = optimizer, take_part, False, scaler
        if scaler is not None:
            if not isinstance(scaler.step, _WatchedStep):
                scaler.step = _WatchedStep(scaler.step)
            scaler.step.watches.append(self)

    def stepped(self) -> None:
        """The optimizer has stepped, and the worker took part."""
        self.has_stepped = True

    def remove(self) -> None:
        """End the watch; after the last one the scaler is as it was."""
        if self._scaler is not None:
            self._scaler.step.watches.remove(self)
            if not self._scaler.step.watches:
                del self._scaler.step  # uncovers the method of its class


class _WatchedStep:
    """`GradScaler.step` for those who watch the optimizer that it steps."""

    def __init__(self, step: Callable[..., Any]):
        self._step = step
        self.watches: list[ScalerWatch] = []

    def __call__(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        watches = [watch for watch in self.watches if watch.optimizer is unwrapped(optimizer)]
        for watch in watches:
            watch.has_stepped = False
        result = self._step(optimizer, *args, **kwargs)
        for watch in watches:
            if not watch.has_stepped:
                watch.take_part()
        return result
