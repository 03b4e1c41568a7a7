"""Averages states of the inner optimizer over workers, such as Adam's moments: `state_every` of `Local`.

An optimizer makes the states of a parameter in the first step with a gradient of it, and chooses their shapes and types. So one
worker may lack a state that others have: a loss scaler skipped its first step, or a parameter had no gradient there. A state is
averaged where all workers have it. Elsewhere each worker keeps its own, and the others do not wait for it:

    1. compare   for which parameters each worker has the state, and of which shape and type
    2. average   the states that all workers have

Phase 1 costs 32 bytes a message where workers have the same. It is left out once all have the state of all parameters, unless
workers may come and go. Then one element is added to the smallest message, which goes first: whether this worker has lost a
state since, such as by `optimizer.state.clear()`. If one has, nothing is averaged that time, and they compare the next time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...algorithm import require
from ...average.base import NamedTensors
from ...comm import Communicator
from ...comm.compare import describe
from ..model.shards import local
from .tensors import average_exactly

Found = dict[str, Any]
"""By parameter: shape and type of its state, or the names of its other states if it lacks this one."""


class OptimizerStates:
    """The states of one worker's optimizer; see the module's text.

    Args:
        optimizer: the inner one.
        parameters: those of the model that take part, with their names.
        comm: connects the workers.

    Example:
        >>> import torch, thinwire as tw
        >>> def worker(comm):
        ...     p = torch.nn.Parameter(torch.zeros(1))
        ...     optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9)
        ...     p.grad = torch.tensor([float(comm.rank)])
        ...     optimizer.step()
        ...     OptimizerStates(optimizer, [("p", p)], comm).average("momentum_buffer")
        ...     return optimizer.state[p]["momentum_buffer"].item()
        >>> tw.LocalWorld(2).run(worker)
        [0.5, 0.5]
    """

    def __init__(self, optimizer: Optimizer, parameters: NamedTensors, comm: Communicator):
        self._optimizer, self._parameters, self._comm = optimizer, parameters, comm
        self._complete: dict[str, tuple[Found, str, Tensor]] = {}  # by state that all workers had for all parameters

    def average(self, key: str) -> None:
        """Replace a state by its mean, for those parameters for which all workers have it. All workers call it.

        Raises:
            ValueError: on all workers: the optimizer has no such state, it is no tensor of floating point, or workers have
                it in different shapes or types.
        """
        found = {name: _found(self._optimizer.state.get(p, {}), key) for name, p in self._parameters}
        if key in self._complete:
            self._average_complete(key, found)
            return
        states = self._common(key, found)
        average_exactly(list(states.values()), self._comm)
        if states.keys() == found.keys() and not self._comm.is_elastic:
            name = min(states, key=lambda name: local(states[name]).numel())
            self._complete[key] = found, name, _message(states[name])

    def _common(self, key: str, found: Found) -> dict[str, Tensor]:
        """Phase 1: the states of those parameters for which all workers have it."""
        workers = self._comm.gather_if_different(found)
        others = {name for one in workers for value in one.values() if isinstance(value, list) for name in value}
        is_known = key in others or any(isinstance(value, str) for one in workers for value in one.values())
        kind = type(self._optimizer).__name__
        require(
            is_known or not others,
            f"Local: state_every names {key!r}, and the states of {kind} are {sorted(others)}",
        )
        names = [name for name in found if all(isinstance(one[name], str) for one in workers)]
        for name in names:
            values = [one[name] for one in workers]
            require(
                len(set(values)) == 1,
                f"Local: state_every names {key!r}, and for parameter {name!r} it is {describe(values)}; use the same "
                f"{kind} on all workers, or leave {key!r} out",
            )
        states = {name: self._optimizer.state[p][key] for name, p in self._parameters if name in names}
        for name, state in states.items():
            require(
                isinstance(state, Tensor) and state.is_floating_point(),
                f"Local: state_every names {key!r}, which {kind} keeps for parameter {name!r} as {found[name]}; only tensors "
                f"of floating point have a mean, so leave {key!r} out",
            )
        return states

    def _average_complete(self, key: str, found: Found) -> None:
        """Phase 2 where all workers had the state of all parameters the last time."""
        before, smallest, message = self._complete[key]
        states = {name: self._optimizer.state[p][key] for name, p in self._parameters} if found == before else {}
        message = _message(states.pop(smallest)) if states else message.fill_(1)
        self._comm.all_reduce(message).wait()
        if message[-1] != 0:
            del self._complete[key]
            return
        average_exactly(list(states.values()), self._comm)
        state = local(self._optimizer.state[dict(self._parameters)[smallest]][key])
        state.copy_(message[:-1].div_(self._comm.size).view_as(state))


def _found(state: dict[str, Any], key: str) -> str | list[str]:
    value = state.get(key)
    if value is None:
        return sorted(map(str, state))
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(local(value).shape)}"


def _message(state: Tensor) -> Tensor:
    """The elements of a state, and a zero."""
    held = local(state)
    return torch.cat([held.reshape(-1), held.new_zeros(1)])
