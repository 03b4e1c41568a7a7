"""Memory: what a worker keeps of the values that its payloads did not carry.

The contract of a round:

    compensate    the values to send, made of the gradient and of memory      before encode
    decoded       may turn the decoded mean into the result                   after decode, optional
    commit        keep what this round changed                                at the end, if all results are finite
    discard       forget what this round changed                              at the end otherwise

`compensate(state, name, gradient, scale)` returns a flat float32 buffer that the state owns. The averager encodes this
buffer with itself as the residual: afterwards it holds what the payload did not carry. Memory changes in `commit` only,
so a round in which any worker meets an infinite gradient leaves no trace.

Momentum. A memory with `has_momentum` applies the optimizer's momentum before gradients are encoded. Where it
`needs_support`, the averager zeroes the buffer `masked` at every position that was sent. A lossless codec encodes
nothing for such a memory: all tensors travel dense, and `decoded` applies momentum to their mean.

Units. Under a loss scaler gradients arrive multiplied by `scale`. Memory and what `compensate` returns are unscaled, so
the loss scale may change between rounds.

Memory is keyed by parameter name. The guide's page "Add a memory" writes one in four steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..algorithm import Algorithm, require

NamedTensors = Sequence[tuple[str, Tensor]]


class Memory(Algorithm, ABC):
    """What a worker remembers between rounds; the text of this module is the contract."""

    has_momentum: ClassVar[bool] = False

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

    def decoded(self, state: Any, name: str, mean: Tensor, scale: float = 1.0, encoded: bool = True) -> None:
        """Turn the decoded mean over all workers into the result, in place; by default the mean is the result.

        Called once per tensor and round, after decoding and before `commit`. Keep what changes pending until `commit`.

        Args:
            state: this worker's memory.
            name: of the tensor.
            mean: float32 in the tensor's shape, the same bits on all workers.
            scale: the loss scale that `mean` is multiplied by.
            encoded: whether the tensor came through `compensate` and the codec; False if it travelled dense.
        """


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
