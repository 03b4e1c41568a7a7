"""The arguments of `Optimizer.step`, as its pre-hooks get and replace them; the first is the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """The closure among the arguments; None if there is none."""
    return args[1] if len(args) > 1 else kwargs.get("closure")


def with_closure(args: tuple[Any, ...], kwargs: dict[str, Any], closure: Callable[[], Any]) -> Arguments:
    """The same arguments with another closure."""
    others = {name: value for name, value in kwargs.items() if name != "closure"}
    return (args[0], closure, *args[2:]), others


def once_gradients_are_there(args: tuple[Any, ...], kwargs: dict[str, Any], act: Callable[[], None]) -> Arguments:
    """Call `act` when the step's gradients are there: now, or after each call of the closure that computes them.

    Returns:
        The arguments for the step.
    """
    closure = closure_of(args, kwargs)
    if closure is None:
        act()
        return args, kwargs

    def evaluate() -> Any:
        loss = closure()
        act()
        return loss

    return with_closure(args, kwargs, evaluate)
