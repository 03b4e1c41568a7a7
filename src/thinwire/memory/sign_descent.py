"""Sign descent: the result of a round is the sign of the decoded mean."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..algorithm import require
from ..codec import Selection
from .base import Memory, NamedTensors
from .error_feedback import ErrorFeedback


@dataclass(frozen=True, repr=False)
class SignDescent(Memory):
    """Another memory, whose round ends with `result <- sign(mean)`, for encoded and dense tensors.

    Then `x <- x - lr result` moves every coordinate by lr, as Adam does at first. Elements that no worker sent have the sign
    0. With a transform the sign is taken of the tensor, not of the coordinates that are sent.

    Args:
        memory: what a worker keeps; DeMo's is `ErrorFeedback(decay=0.999)`, a momentum.

    Raises:
        ValueError: memory is not a memory.

    Source: Peng et al. 2024, DeMo, arXiv 2411.19870.

    Example:
        >>> import torch, thinwire as tw
        >>> def worker(comm):
        ...     x = torch.tensor([[3.0, -1.0], [0.0, 0.5]])
        ...     averager = tw.Mean(tw.TopK(0.5), tw.memory.SignDescent())
        ...     state = averager.init([("x", x)], comm)
        ...     averager.step(state, [("x", x)], comm).wait()
        ...     averager.commit(state)
        ...     return x.tolist()
        >>> tw.LocalWorld(1).run(worker)[0]
        [[1.0, -1.0], [0.0, 0.0]]
    """

    memory: Memory = field(default_factory=lambda: ErrorFeedback(decay=0.999))

    def __post_init__(self) -> None:
        require(
            isinstance(self.memory, Memory) and not self.memory.has_momentum,
            f"SignDescent: memory must be one without momentum, such as ErrorFeedback(decay=0.999), got {self.memory!r}",
        )

    @property
    def needs_mean(self) -> bool:
        return self.memory.needs_mean

    @property
    def needs_support(self) -> bool:
        return self.memory.needs_support

    def init(self, tensors: NamedTensors, dense: NamedTensors = ()) -> Any:
        return self.memory.init(tensors, dense)

    def compensate(self, state: Any, name: str, gradient: Tensor, scale: float = 1.0) -> Tensor:
        return self.memory.compensate(state, name, gradient, scale)

    def compensate_all(
        self, state: Any, tensors: NamedTensors, scale: float = 1.0, counts: list[int] | None = None
    ) -> tuple[list[Tensor], Selection | None]:
        return self.memory.compensate_all(state, tensors, scale, counts)

    def masked(self, state: Any, name: str) -> Tensor:
        return self.memory.masked(state, name)

    def decoded(self, state: Any, name: str, mean: Tensor, scale: float = 1.0, encoded: bool = True) -> None:
        """The sign of what the other memory makes of the mean, times the loss scale; NaN where that is not finite."""
        self.memory.decoded(state, name, mean, scale, encoded)
        # Times the loss scale, as `mean` was, so that unscaling leaves the signs.
        signs = torch.sign(mean) * scale
        mean.sub_(mean).add_(signs)  # zero first, or NaN

    def commit(self, state: Any) -> None:
        self.memory.commit(state)

    def discard(self, state: Any) -> None:
        self.memory.discard(state)
