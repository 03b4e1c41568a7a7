"""The parameters that take part in a strategy, looked up in the model at each use.

A model may replace a parameter's storage at any time: `model.bfloat16()`, `p.data = ...`, `vector_to_parameters`,
`swap_tensors`. So a strategy keeps the parameters themselves, never views of their storage. Changes that averaging cannot
follow are errors:

    another dtype, shape or device      the averager's state does not fit any more
    a parameter replaced or removed     the optimizer would update the old one
    a parameter added or unfrozen       it would drift apart between workers

A parameter that is frozen later stays in the rounds, because rounds are the same on all workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from ...average.base import NamedTensors
from .models import NamedParameters, kind_of, values_of


class LiveParameters:
    """Named parameters of one model; see the module's text.

    Args:
        call: the strategy's name, for messages.
        rank: of this worker, for messages.
        model: the module that holds the parameters.
        parameters: those that take part, by name.
        trained: gives the parameters that are trained now; they must all take part.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 1, bias=False)
        >>> live = LiveParameters("Local", 0, model, [("weight", model.weight)], model.parameters)
        >>> model.weight.data = torch.zeros(1, 2)
        >>> live.tensors()
        [('weight', tensor([[0., 0.]]))]
        >>> _ = model.double()
        >>> live.check()
        Traceback (most recent call last):
        ValueError: Local: rank 0: parameter 'weight' was (1, 2) torch.float32 on cpu and is now ...
    """

    def __init__(
        self,
        call: str,
        rank: int,
        model: nn.Module,
        parameters: NamedParameters,
        trained: Callable[[], Iterable[nn.Parameter]],
    ):
        self._where, self._remedy = f"{call}: rank {rank}", f"detach(), and call {call} again"
        self._model, self._parameters, self._trained = model, parameters, trained
        self._kinds = [kind_of(p) for _, p in parameters]
        self._ids = {id(p) for _, p in parameters}

    def tensors(self) -> NamedTensors:
        """The values as they are now, in place: real tensors, complex ones as pairs of real numbers."""
        return [(name, values_of(p)) for name, p in self._parameters]

    def check(self) -> None:
        """Raise a ValueError that names the first parameter that averaging cannot follow any more."""
        # Runs in every step, so messages are built only where they are raised.
        names = {id(p): name for name, p in self._model.named_parameters()}
        for (name, p), before in zip(self._parameters, self._kinds, strict=True):
            if id(p) not in names:
                raise ValueError(
                    f"{self._where}: parameter {name!r} was replaced or removed, and the new one takes no part; "
                    f"{self._remedy}, with an optimizer of the new parameters"
                )
            now = kind_of(p)
            if now != before:
                raise ValueError(
                    f"{self._where}: parameter {name!r} was {before} and is now {now}; convert the model before it is "
                    f"attached: {self._remedy}"
                )
        for p in self._trained():
            if id(p) not in self._ids:
                raise ValueError(
                    f"{self._where}: parameter {names.get(id(p), '(not of this model)')!r} is trained since later, takes no "
                    f"part, and would drift apart between workers; {self._remedy}"
                )
