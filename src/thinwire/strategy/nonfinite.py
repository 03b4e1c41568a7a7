"""What a strategy does about a step whose gradient or update is infinite or NaN.

    "skip"     the step is not applied; after `max_nonfinite` such steps in a row an error follows
    "raise"    an error follows at once
    "apply"    the values are applied as they are

The error names the first worker, and its first parameter, that was not finite.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor

from ..comm import Communicator
from .model.shards import Replica

POLICIES = ("skip", "raise", "apply")
Looks = list[tuple[str, Tensor]]
"""What tensors are called, and whether each was finite."""


class NonfiniteSteps:
    """Counts the steps that were not finite, and says what follows from each.

    Args:
        call: the strategy's name, for messages.
        policy: "skip", "raise" or "apply"; see the module's text.
        limit: with "skip", how many such steps in a row end in an error.

    Example:
        >>> steps = NonfiniteSteps("Gradients", "skip", limit=2)
        >>> steps.record(True), steps.record(False, warn=False), steps.is_last_chance, steps.record(False)
        ('apply', 'skip', True, 'raise')
        >>> steps.num_skipped
        1
    """

    def __init__(self, call: str, policy: str, limit: int):
        self._call, self._policy, self._limit = call, policy, limit
        self._num_in_row = 0
        self._has_warned = False
        self.num_skipped = 0

    @property
    def is_last_chance(self) -> bool:
        """Whether the next step raises if it is not finite: then find out whose fault it is."""
        return self._policy == "raise" or (self._policy == "skip" and self._num_in_row + 1 >= self._limit)

    def record(self, finite: bool, warn: bool = True) -> str:
        """Count a step and return what to do with it: "apply", "skip" or "raise".

        Args:
            finite: whether all of it was finite.
            warn: whether the first step that is skipped warns; not where a loss scaler provokes such steps.
        """
        if finite or self._policy == "apply":
            self._num_in_row = 0
            return "apply"
        self._num_in_row += 1
        if self._policy == "raise" or self._num_in_row >= self._limit:
            self._num_in_row = 0
            return "raise"
        self.num_skipped += 1
        if warn and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{self._call}: a step was not finite and is skipped; further ones are counted in num_skipped, and "
                f"{self._limit} in a row are an error",
                RuntimeWarning,
                stacklevel=2,
            )
        return "skip"

    def error(self, culprit: str) -> FloatingPointError:
        """The error to raise.

        Args:
            culprit: what was not finite, such as what `first_culprit` returned.
        """
        how_often = "a step was" if self._policy == "raise" else f"{self._limit} steps in a row were"
        return FloatingPointError(
            f"{self._call}: {how_often} not finite; {culprit}. Lower the learning rate, clip gradients, or look at that "
            "worker's data"
        )


def look_at(tensors: Iterable[tuple[str, Tensor]]) -> Looks:
    """Whether each tensor is finite as it is now; no host waits for a GPU, which tells it later."""
    return [(name, torch.isfinite(t).all()) for name, t in tensors]


def first_of(looks: Looks) -> str | None:
    """The name of the first tensor that was not finite."""
    return next((name for name, was_finite in looks if not was_finite), None)


def first_nonfinite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """The name of the first tensor that holds an infinite or NaN value."""
    return first_of(look_at(tensors))


def first_culprit(own: str | None, comm: Communicator, shards: Replica) -> str:
    """The first worker, and its first parameter, that was not finite. All workers call it and get the same.

    Args:
        own: the first parameter of this worker that was not finite, if one was.
        comm: connects the workers.
        shards: the workers that hold the other shards of the model.

    Example:
        >>> import thinwire as tw
        >>> shards = Replica("Gradients", torch.nn.Linear(1, 1))  # not sharded
        >>> tw.LocalWorld(2).run(lambda comm: first_culprit("head.weight" if comm.rank else None, comm, shards))[0]
        "first on rank 1, parameter 'head.weight'"
    """
    names = enumerate(comm.gather_objects(own))
    found = next((f"first on rank {rank}, parameter {name!r}" for rank, name in names if name is not None), None)
    return shards.first(found) or "every worker's own gradients were finite, and their average was not"
