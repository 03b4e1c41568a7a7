"""Error feedback: what a payload did not carry is added to the next gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import kernels
from ..codec import Selection
from ..membership import State, config, own, pending
from ..options import require_number
from .base import Memory, NamedTensors, zeros_like_flat


@dataclass
class ErrorFeedbackState(State):
    """What error feedback keeps, by parameter name: flat float32 tensors, in unscaled units.

    Attributes:
        residual: the committed memory.
        spare: the values to send; after encoding, the memory of the next commit.
        pending: names of the tensors that were compensated since the last commit.
    """

    residual: dict[str, Tensor] = own()
    spare: dict[str, Tensor] = config()  # written anew in every round
    pending: set[str] = pending(default_factory=set)


@dataclass(frozen=True, repr=False)
class ErrorFeedback(Memory):
    """Adds what earlier payloads did not carry to the next gradient: send `C(g + d e)`, keep `e = g + d e - C(g + d e)`.

    Check: with d = 1, what was sent so far plus e is the sum of all gradients, so nothing is lost, only late. It costs two
    float32 copies of what is encoded: the committed memory, which is kept multiplied by d, and the pending one.

    Args:
        decay: d, in (0, 1]; lower => forgets more of what is late. SparseLoCo's 0.95 and DeMo's 0.999 make the memory a
            momentum from which what was sent is subtracted.

    Raises:
        ValueError: decay out of range.

    Source: Seide et al. 2014; Stich et al. 2018, arXiv 1809.07599; Karimireddy et al. 2019, arXiv 1901.09847. With decay:
        Peng et al. 2024, DeMo, arXiv 2411.19870; Sarfi et al. 2025, SparseLoCo, arXiv 2508.15706.

    Example:
        >>> import torch, thinwire as tw
        >>> memory, codec = tw.ErrorFeedback(), tw.TopK(ratio=0.5)
        >>> state = memory.init([("w", torch.zeros(2))])
        >>> x = memory.compensate(state, "w", torch.tensor([3.0, 1.0]))
        >>> payload = codec.encode(x, residual=x)
        >>> memory.commit(state)
        >>> state.residual["w"]  # the smaller one waits
        tensor([0., 1.])
    """

    decay: float = 1.0

    def __post_init__(self) -> None:
        require_number("ErrorFeedback: decay", self.decay, above=0, most=1)

    def init(self, tensors: NamedTensors, dense: NamedTensors = ()) -> ErrorFeedbackState:
        return ErrorFeedbackState(residual=zeros_like_flat(tensors), spare=zeros_like_flat(tensors))

    def compensate(self, state: ErrorFeedbackState, name: str, gradient: Tensor, scale: float = 1.0) -> Tensor:
        x = state.spare[name]
        # Added in the gradient's shape: a gradient that is not contiguous needs no flat copy.
        torch.add(state.residual[name].view_as(gradient), gradient, alpha=1.0 / scale, out=x.view_as(gradient))
        state.pending.add(name)
        return x

    def compensate_all(
        self, state: ErrorFeedbackState, tensors: NamedTensors, scale: float = 1.0, counts: list[int] | None = None
    ) -> tuple[list[Tensor], Selection | None]:
        if not counts:
            return super().compensate_all(state, tensors, scale)
        gradients, residuals, xs = self._begin(state, tensors)
        # Adds and selects in one pass over memory.
        indices, values = kernels.momentum.add_topk(gradients, residuals, xs, 1.0 / scale, counts)
        return xs, Selection(indices, values, counts)

    def compensate_products(
        self, state: ErrorFeedbackState, tensors: NamedTensors, scale: float, ps: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        gradients, residuals, xs = self._begin(state, tensors)
        rows = [len(t) for _, t in tensors]
        return xs, kernels.low_rank.add_products(gradients, residuals, xs, 1.0 / scale, rows, ps)

    def _begin(
        self, state: ErrorFeedbackState, tensors: NamedTensors
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Flat gradients, their committed memory, and the buffers for the values to send, which become pending."""
        names = [name for name, _ in tensors]
        state.pending.update(names)
        gradients = [g.ravel().float() for _, g in tensors]
        return gradients, [state.residual[name] for name in names], [state.spare[name] for name in names]

    def commit(self, state: ErrorFeedbackState) -> None:
        for name in state.pending:
            # Swapped, not copied: since encoding, `spare` holds what the payload did not carry.
            state.residual[name], state.spare[name] = state.spare[name], state.residual[name]
            if self.decay != 1:
                state.residual[name].mul_(self.decay)  # here, so that the fused passes need not know of it
        state.pending.clear()
