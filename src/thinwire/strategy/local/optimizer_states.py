"""Averages states of the inner optimizer over workers, such as Adam's moments: `state_every` of `Local`.

An optimizer makes the states of a parameter in the first step with a gradient of it, and chooses their shapes and types. So one
worker may lack a state that others have: a loss scaler skipped its first step, or a parameter had no gradient there. A state is
averaged where all workers have it. Elsewhere each worker keeps its own, and the others do not wait for it:

    1. compare   for which parameters each worker has the states, and of which shape and type: 32 bytes a message while workers
                 have the same
    2. average   the states that all workers have
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ...algorithm import require
from ...average.base import NamedTensors
from ...comm import Communicator
from ...comm.compare import describe
from ..model.joined import average_exactly
from ..model.shards import local

Found = dict[str, Any]
"""By parameter: shape and type of its state, or the names of its other states if it lacks this one."""


def average_states(optimizer: Optimizer, parameters: NamedTensors, keys: Sequence[str], comm: Communicator) -> None:
    """Replace states by their means, for those parameters for which all workers have them. All workers call it.

    Args:
        optimizer: the inner one.
        parameters: those of the model that take part, with their names.
        keys: names of states.
        comm: connects the workers.

    Raises:
        ValueError: on all workers: the optimizer has no such state, it is no tensor of floating point, or workers have
            it in different shapes or types.

    Example:
        >>> import torch, thinwire as tw
        >>> def worker(comm):
        ...     p = torch.nn.Parameter(torch.zeros(1))
        ...     optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9)
        ...     p.grad = torch.tensor([float(comm.rank)])
        ...     optimizer.step()
        ...     average_states(optimizer, [("p", p)], ["momentum_buffer"], comm)
        ...     return optimizer.state[p]["momentum_buffer"].item()
        >>> tw.LocalWorld(2).run(worker)
        [0.5, 0.5]
    """
    found = {key: {name: _found(optimizer.state.get(p, {}), key) for name, p in parameters} for key in keys}
    workers = comm.gather_if_different(found)
    states = [_common(optimizer, parameters, key, [one[key] for one in workers]) for key in keys]
    average_exactly([state for of_key in states for state in of_key], comm)


def _common(optimizer: Optimizer, parameters: NamedTensors, key: str, workers: Sequence[Found]) -> list[Tensor]:
    """The states of those parameters for which all workers have it."""
    others = {name for one in workers for value in one.values() if isinstance(value, list) for name in value}
    is_known = key in others or any(isinstance(value, str) for one in workers for value in one.values())
    kind = type(optimizer).__name__
    require(is_known or not others, f"Local: state_every names {key!r}, and the states of {kind} are {sorted(others)}")
    states = []
    for name, p in parameters:
        values = [one[name] for one in workers]
        if not all(isinstance(value, str) for value in values):
            continue
        require(
            len(set(values)) == 1,
            f"Local: state_every names {key!r}, and for parameter {name!r} it is {describe(values)}; use the same "
            f"{kind} on all workers, or leave {key!r} out",
        )
        state = optimizer.state[p][key]
        require(
            isinstance(state, Tensor) and state.is_floating_point(),
            f"Local: state_every names {key!r}, which {kind} keeps for parameter {name!r} as {values[0]}; only tensors "
            f"of floating point have a mean, so leave {key!r} out",
        )
        states.append(state)
    return states


def _found(state: dict[str, Any], key: str) -> str | list[str]:
    value = state.get(key)
    if value is None:
        return sorted(map(str, state))
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(local(value).shape)}"
