"""Memory: what a worker keeps of the values that its payloads did not carry.

The contract of a round:

    compensate    the values to send, made of the gradient and of memory      before encode, in `compensate_all`
    decoded       may turn the decoded mean into the result                   after decode, optional
    commit        keep what this round changed                                at the end, if all results are finite
    discard       forget what this round changed                              at the end otherwise

`compensate(state, name, gradient, scale)` returns a flat float32 buffer that the state owns. The averager encodes this
buffer with itself as the residual: afterwards it holds what the payload did not carry. Memory changes in `commit` only,
so a round in which any worker meets an infinite gradient leaves no trace. What belongs to the round alone is in fields of the
kind `pending`.

Mean. A memory with `needs_mean` relies on the decoded mean being that of all workers' payloads.

Momentum. A memory with `has_momentum` applies the optimizer's momentum before gradients are encoded. Where it
`needs_support`, the averager zeroes the buffer `masked` at every position that was sent. A lossless codec encodes
nothing for such a memory: all tensors travel dense, and `decoded` applies momentum to their mean.

Units. Under a loss scaler gradients arrive multiplied by `scale`. Memory and what `compensate` returns are unscaled, so
the loss scale may change between rounds.

Fused selection. Where the codec sends exactly the k largest values, `compensate_all` receives k for each tensor. A memory
may then select them in the pass that makes them, and return the selection.

Membership. The number of workers belongs to a round, not to a run. Each field of a state, which `init` returns, says what
becomes of it when workers come and go: see `thinwire.membership`.

Memory is keyed by parameter name. The guide's page "Add a memory" writes one in four steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import kernels
from ..algorithm import Algorithm
from ..codec import Selection
from ..kernels.checks import described
from ..membership import forget

NamedTensors = Sequence[tuple[str, Tensor]]


class Memory(Algorithm, ABC):
    """What a worker keeps between rounds; the module's docstring is the contract."""

    has_momentum: ClassVar[bool] = False

    @property
    def needs_mean(self) -> bool:
        """Whether it relies on the mean over all workers."""
        return False

    @property
    def needs_support(self) -> bool:
        """Whether it must know which positions were sent; see `masked`."""
        return False

    @abstractmethod
    def init(self, tensors: NamedTensors, dense: NamedTensors = ()) -> Any:
        """Zero memory for `tensors`, which are encoded, and for `dense`, which never are."""

    @abstractmethod
    def compensate(self, state: Any, name: str, gradient: Tensor, scale: float = 1.0) -> Tensor:
        """The values to send for `gradient`, which is multiplied by the loss scale: a flat float32 buffer."""

    @abstractmethod
    def commit(self, state: Any) -> None:
        """Keep what changed since the last commit."""

    def discard(self, state: Any) -> None:
        """Forget what changed since the last commit: the fields of the state that are `pending`."""
        forget(state)

    def compensate_all(
        self, state: Any, tensors: NamedTensors, scale: float = 1.0, counts: list[int] | None = None
    ) -> tuple[list[Tensor], Selection | None]:
        """`compensate` for many tensors; it may also select what the codec will send.

        Args:
            state: this worker's memory.
            tensors: the gradients, multiplied by the loss scale.
            scale: the loss scale.
            counts: how many of the largest magnitudes of each tensor the codec will send; None if it does not send
                exactly these.

        Returns:
            The values to send, one flat buffer per tensor; and the selection, or None to let the codec select.
        """
        return [self._compensated(state, name, gradient, scale) for name, gradient in tensors], None

    def compensate_products(
        self, state: Any, tensors: NamedTensors, scale: float, ps: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """`compensate` for matrices, with their products with a few vectors, as PowerSGD needs them.

        Args:
            state: this worker's memory.
            tensors: the gradients, multiplied by the loss scale; each is seen as a matrix (n, m), n its first dimension.
            scale: the loss scale.
            ps: for each tensor float32 of shape (rank, m).

        Returns:
            The values to send, one flat buffer per tensor; and `p x'` for each, of shape (rank, n).
        """
        xs = [self._compensated(state, name, gradient, scale) for name, gradient in tensors]
        return xs, kernels.low_rank.products(xs, [len(t) for _, t in tensors], ps, left=False)

    def _compensated(self, state: Any, name: str, gradient: Tensor, scale: float) -> Tensor:
        """What `compensate` returns, checked."""
        x = self.compensate(state, name, gradient, scale)
        # For each tensor of each round, so the message is built only when it is raised.
        if not isinstance(x, Tensor) or x.dtype != torch.float32 or x.dim() != 1 or x.numel() != gradient.numel():
            raise ValueError(
                f"{self}: compensate must return a flat float32 buffer of {gradient.numel()} elements for {name!r}, got "
                f"{described(x)}"
            )
        return x

    def masked(self, state: Any, name: str) -> Tensor:
        """With `needs_support`: the flat buffer that the averager zeroes at every position that was sent."""
        raise NotImplementedError(f"{self} masks nothing: needs_support is False")

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


def zeros_like_flat(tensors: NamedTensors) -> dict[str, Tensor]:
    """A flat float32 buffer of zeros for each tensor, on its device."""
    return {name: t.new_zeros(t.numel(), dtype=torch.float32) for name, t in tensors}
