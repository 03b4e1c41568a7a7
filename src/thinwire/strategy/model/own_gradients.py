"""What a worker does about its own gradient where that is infinite or NaN, and each worker has a model of its own.

The worker skips its own update: it sets the gradients to None, which every optimizer of PyTorch takes as "no update", so that
momentum stays as it was too. It still takes part in averaging. The other workers go on as if this one had made a zero update.
`nonfinite.py` counts such steps and ends the run after many in a row.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.optim import Optimizer

from ... import kernels
from ..nonfinite import Looks, NonfiniteSteps, first_nonfinite, first_of
from .models import values_of
from .optimizer_step import Arguments, once_gradients_are_there
from .shards import Replica


class OwnGradients:
    """Checks the gradients of one worker before its optimizers apply them; see the module's text.

    Args:
        steps: counts the steps and says what follows.
        rank: of this worker, for messages.
        names: the model's parameters by name, for messages.
        shards: the workers that hold the other shards of the model; a step is finite if it is so on all of them.

    Example:
        >>> import torch
        >>> p = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([p], lr=1.0)
        >>> shards = Replica("Local", torch.nn.Linear(1, 1))  # not sharded
        >>> own = OwnGradients(NonfiniteSteps("Local", "raise", 1), 0, [("p", p)], shards)
        >>> p.grad = torch.tensor([float("nan"), 0.0])
        >>> own.check(optimizer)
        Traceback (most recent call last):
        FloatingPointError: Local: a step was not finite; first on rank 0, parameter 'p'. Lower ...
    """

    def __init__(self, steps: NonfiniteSteps, rank: int, names: Iterable[tuple[str, Tensor]], shards: Replica):
        self._steps, self._rank, self._shards = steps, rank, shards
        self._names = {id(p): name for name, p in names}
        self.looks: Looks = []
        """At this worker's own, before all workers' was added up, where gradients are sums already."""

    def check(self, optimizer: Optimizer) -> None:
        """Drop the optimizer's gradients if any of them is not finite, as the policy says.

        Raises:
            FloatingPointError: the policy is "raise", or too many steps in a row were not finite.
        """
        held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        values = [(self._names.get(id(p), "(not of this model)"), _values(p.grad)) for p in held]
        # One flag for all gradients, because the host waits for a GPU to read it.
        action = self._steps.record(self._shards.all(kernels.flags.read(kernels.all_finite([v for _, v in values]))))
        if action == "raise":
            name, culprit = first_nonfinite(values), first_of(self.looks)
            found = self._shards.first(culprit and f"first on rank {self._rank}, {culprit}") or self._shards.first(
                name and f"first on rank {self._rank}, parameter {name!r}"
            )
            raise self._steps.error(found)
        if action == "skip":
            for p in held:
                p.grad = None

    def guard(self, optimizer: Optimizer, arguments: Arguments) -> Arguments:
        """Check a step whose arguments these are: now, or where a closure computes the gradients, after it."""
        return once_gradients_are_there(arguments, lambda: self.check(optimizer))


def _values(gradient: Tensor) -> Tensor:
    return values_of((gradient.coalesce().values() if gradient.is_sparse else gradient).resolve_conj().resolve_neg())
