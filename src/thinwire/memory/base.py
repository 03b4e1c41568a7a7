"""Memory: what a worker keeps of the values that its payloads did not carry.

The contract of a round:

    compensate    the values to send, made of the gradient and of memory      before encode, in `compensate_all`
    decoded       may turn the decoded mean into the result                   after decode, optional
    commit        keep what this round changed                                at the end, if all results are finite
    discard       forget what this round changed                              at the end otherwise

`compensate(state, name, gradient, scale)` returns a flat float32 buffer that the state owns. The averager encodes this
buffer with itself as the residual: afterwards it holds what the payload did not carry. Memory changes in `commit` only,
so a round in which any worker meets an infinite gradient leaves no trace.

Mean. A memory with `needs_mean` relies on the decoded mean being that of all workers' payloads.

Momentum. A memory with `has_momentum` applies the optimizer's momentum before gradients are encoded. Where it
`needs_support`, the averager zeroes the buffer `masked` at every position that was sent. A lossless codec encodes
nothing for such a memory: all tensors travel dense, and `decoded` applies momentum to their mean.

Units. Under a loss scaler gradients arrive multiplied by `scale`. Memory and what `compensate` returns are unscaled, so
the loss scale may change between rounds.

Fused selection. Where the codec sends exactly the k largest values, `compensate_all` receives k for each tensor. A memory
may then select them in the pass that makes them, and return the selection.

Membership. The number of workers belongs to a round, not to a run. Each entry of a saved state is this worker's own, or
`is_shared` by all workers. `thinwire.membership` says what happens to either kind when workers come and go.

Memory is keyed by parameter name. The guide's page "Add a memory" writes one in four steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import kernels
from ..algorithm import Algorithm, require
from ..codec import Selection
from ..membership import dealt, norm_of

NamedTensors = Sequence[tuple[str, Tensor]]


class Memory(Algorithm, ABC):
    """What a worker keeps between rounds; the module's docstring is the contract."""

    has_momentum: ClassVar[bool] = False
    needs_mean: ClassVar[bool] = False

    @property
    def needs_support(self) -> bool:
        """Whether it must know which positions were sent; see `masked`."""
        return False

    def is_shared(self, key: str, saved: Mapping[str, Tensor]) -> bool:
        """Whether the entry `key` of a saved state is the same on all workers; by default it is this worker's own."""
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

    @abstractmethod
    def discard(self, state: Any) -> None:
        """Forget what changed since the last commit."""

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
        return [self.compensate(state, name, gradient, scale) for name, gradient in tensors], None

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
        xs = [self.compensate(state, name, gradient, scale) for name, gradient in tensors]
        return xs, kernels.low_rank.products(xs, [len(t) for _, t in tensors], ps, left=False)

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

    # ---- when workers come and go ----

    def deal(self, saved: Sequence[Mapping[str, Tensor]], rank: int, size: int) -> dict[str, Tensor]:
        """The saved state of worker `rank` of `size`, from those of all workers before, in rank order.

        Own entries are dealt out so that their mean over workers is kept; see `membership.dealt`.
        """
        return {
            key: value.clone() if self.is_shared(key, saved[0]) else dealt([one[key] for one in saved], rank, size)
            for key, value in saved[0].items()
        }

    def shared(self, state: Any) -> dict[str, Tensor]:
        """The shared entries of the state, for a worker that joins."""
        saved = state.state_dict()
        return {key: value for key, value in saved.items() if self.is_shared(key, saved)}

    def adopt(self, state: Any, shared: Mapping[str, Tensor]) -> None:
        """Take over the shared entries of a live worker; own entries start at zero."""
        zeroed = {key: torch.zeros_like(value) for key, value in state.state_dict().items()}
        state.load_state_dict(zeroed | dict(shared))

    def own_norm(self, state: Any) -> float:
        """The Euclidean norm of the own entries: what would be lost with this worker."""
        saved = state.state_dict()
        return norm_of(value for key, value in saved.items() if not self.is_shared(key, saved))

    def regroup(self, state: Any) -> None:
        """Other workers take part from now on. By default memory does not depend on who they are."""


def load_buffers(buffers: dict[str, Tensor], saved: dict[str, Tensor], what: str) -> None:
    """Copy saved buffers into those of the same names.

    Raises:
        ValueError: names or sizes differ.
    """
    differing = sorted(buffers.keys() ^ saved.keys())
    require(not differing, f"saved {what} does not fit this model: {differing[:5]} are only in one of them")
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
