"""Memory: what happens to what was lost, and what is remembered between steps.

The contract. `compensate(state, name, gradient, scale)` returns what should be sent: a flat float32 buffer that the
state owns. The averager encodes it with itself as the residual, so that afterwards it holds what the payload failed to
carry. Nothing has changed yet: memory is transactional. `commit(state)` makes what was lost the new memory of every
tensor compensated since the last commit; `discard(state)` forgets it and leaves memory as it was. So a step in which
any worker met an infinite gradient leaves no trace.

Momentum. A memory with `has_momentum` applies the optimizer's momentum itself, before gradients are encoded, and the
averager does four things more for it:

    clipped       what gradients become before they are used                          before compensate
    masked        a buffer of memory is zeroed wherever something of a tensor is sent  after encode
    finish_dense  tensors that travelled dense get ordinary momentum                  after decode
    dense rounds  a lossless codec sends nothing encoded: all tensors travel dense

Units. Under a loss scaler the gradient arrives multiplied by `scale`; memory is kept unscaled, and so is what
`compensate` returns, so that a change of the loss scale in between does no harm.

Memory is keyed by parameter name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..algorithm import Algorithm, require

NamedTensors = Sequence[tuple[str, Tensor]]


class Memory(Algorithm, ABC):
    """See the module's text for the contract."""

    has_momentum: ClassVar[bool] = False

    @property
    def whole_model(self) -> bool:
        """Whether it needs the gradients of the whole model at once."""
        return False

    @property
    def needs_support(self) -> bool:
        """Whether it must learn which coordinates were sent, through `masked`."""
        return False

    @abstractmethod
    def init(self, tensors: NamedTensors, dense: NamedTensors = (), num_workers: int = 1) -> Any:
        """The state for `tensors`, which are encoded, and `dense`, which never are: zero memory."""

    @abstractmethod
    def compensate(self, state: Any, name: str, gradient: Tensor, scale: float = 1.0) -> Tensor:
        """What should be sent for `gradient`, which comes multiplied by the loss scale."""

    @abstractmethod
    def commit(self, state: Any) -> None:
        """Keep what was lost since the last commit."""

    @abstractmethod
    def discard(self, state: Any) -> None:
        """Forget what was lost since the last commit."""

    def clipped(
        self, state: Any, gradients: list[Tensor], scale: float, all_reduce: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """The gradients to use instead of these; `all_reduce` sums a float32 vector over all workers, and blocks."""
        return gradients

    def compensate_topk(
        self, state: Any, names: list[str], gradients: list[Tensor], scale: float, counts: list[int]
    ) -> tuple[list[Tensor], tuple[Tensor, Tensor]] | None:
        """`compensate` for many tensors, and in the same pass the `counts[i]` largest magnitudes of each.

        Returns:
            What should be sent, and its (indices, values) as from `kernels.select.topk`; None where there is no such pass.
        """
        return None

    def masked(self, state: Any, name: str) -> Tensor | None:
        """With `needs_support`, the flat buffer that is to be zeroed wherever something was sent of what `compensate`
        returned for `name`."""
        return None

    def finish_dense(self, state: Any, name: str, averaged: Tensor, scale: float = 1.0) -> None:
        """Turn the dense mean of a tensor's gradients, multiplied by the loss scale, into its update, in place."""


def load_buffers(buffers: dict[str, Tensor], saved: dict[str, Tensor], what: str) -> None:
    """Copy saved buffers into those of the same names.

    Raises:
        ValueError: names or sizes differ.
    """
    differing = sorted(buffers.keys() ^ saved.keys())
    require(not differing, f"saved {what} does not fit this model: {differing[:5]} stand on one side only")
    for name, buffer in buffers.items():
        require(
            buffer.numel() == saved[name].numel(),
            f"saved {what} of {name!r} has {saved[name].numel()} elements, expected {buffer.numel()}",
        )
    for name, buffer in buffers.items():
        buffer.copy_(saved[name].view(-1))


def zeros_like_flat(tensors: NamedTensors) -> dict[str, Tensor]:
    """A flat float32 buffer of zeros for each tensor, on its device."""
    return {name: t.new_zeros(t.numel(), dtype=torch.float32) for name, t in tensors}
