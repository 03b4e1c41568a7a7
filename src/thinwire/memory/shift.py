"""Shifts: workers send compressed differences to their own running estimates, which all workers average.

    c_i = C(grad_i - h_i)   is sent;   h_i <- h_i + a c_i;   h <- h + a 1/W sum_i c_i;   the result is h + 1/W sum_i c_i

With a = 1 the result is the new h: EF21. DIANA has a below 1. The estimates start at zero. Every `h_i` is a worker's own, and h
is shared. If workers join or leave a run, h is no longer the mean of those that take part, so all estimates restart at zero.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from .base import Memory, NamedTensors, load_buffers, zeros_like_flat


@dataclass
class ShiftState:
    """What a shift keeps by parameter name: flat float32 tensors, in unscaled units.

    Args:
        estimate: `h_i`, this worker's estimate of its own gradient.
        mean: `h = 1/W sum_i h_i`, the same bits on all workers.
        difference: the difference to send; after encoding, what the payload did not carry.
        sent: the difference before it was encoded.
        pending_mean: the next `h`, by name, until `commit`.
        pending: names of the tensors that were compensated since the last commit.
    """

    estimate: dict[str, Tensor]
    mean: dict[str, Tensor]
    difference: dict[str, Tensor]
    sent: dict[str, Tensor]
    pending_mean: dict[str, Tensor] = field(default_factory=dict)
    pending: set[str] = field(default_factory=set)

    def state_dict(self) -> dict[str, Tensor]:
        """The committed buffers: `<parameter>.estimate` and `<parameter>.mean`."""
        return {name: buffer.clone() for name, buffer in self._buffers().items()}

    def load_state_dict(self, saved: dict[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""
        load_buffers(self._buffers(), saved, "estimates")
        self.forget()

    def forget(self) -> None:
        """Drop what is pending."""
        self.pending.clear()
        self.pending_mean.clear()

    def _buffers(self) -> dict[str, Tensor]:
        estimates = {f"{name}.estimate": buffer for name, buffer in self.estimate.items()}
        return estimates | {f"{name}.mean": buffer for name, buffer in self.mean.items()}


class Shift(Memory):
    """A memory of running estimates; the module's docstring has the equations."""

    needs_mean: ClassVar[bool] = True

    @property
    @abstractmethod
    def rate(self) -> float:
        """a, the share of a difference that the estimates take."""

    def init(self, tensors: NamedTensors, dense: NamedTensors = ()) -> ShiftState:
        buffers = [zeros_like_flat(tensors) for _ in range(4)]
        return ShiftState(buffers[0], buffers[1], buffers[2], buffers[3])

    def is_shared(self, key: str, saved: Mapping[str, Tensor]) -> bool:
        return key.endswith(".mean")

    def regroup(self, state: ShiftState) -> None:
        for buffer in (*state.estimate.values(), *state.mean.values()):
            buffer.zero_()
        state.forget()

    def compensate(self, state: ShiftState, name: str, gradient: Tensor, scale: float = 1.0) -> Tensor:
        difference = state.difference[name]
        flat = gradient.detach().reshape(-1).to(torch.float32)
        torch.sub(flat / scale, state.estimate[name], out=difference)
        state.sent[name].copy_(difference)
        state.pending.add(name)
        return difference

    def decoded(self, state: ShiftState, name: str, mean: Tensor, scale: float = 1.0, encoded: bool = True) -> None:
        """The result is h and the mean of the differences. Dense tensors keep their mean."""
        if encoded:
            difference = mean.reshape(-1) / scale
            state.pending_mean[name] = torch.add(state.mean[name], difference, alpha=self.rate)
            mean.copy_(((state.mean[name] + difference) * scale).view(mean.shape))

    def commit(self, state: ShiftState) -> None:
        for name in state.pending:
            state.estimate[name].add_(state.sent[name] - state.difference[name], alpha=self.rate)
        for name, mean in state.pending_mean.items():
            state.mean[name].copy_(mean)
        state.forget()

    def discard(self, state: ShiftState) -> None:
        state.forget()
