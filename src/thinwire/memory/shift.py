"""Shifts: workers send compressed differences to their own running estimates, which all workers average.

    c_i = C(grad_i - h_i)   is sent;   h_i <- h_i + a c_i;   h <- h + a 1/W sum_i c_i;   the result is h + 1/W sum_i c_i

With a = 1 the result is the new h: EF21. DIANA has a below 1. The estimates start at zero. Every `h_i` is a worker's own, and h
is shared. If workers join or leave a run, h is no longer the mean of those that take part, so all estimates restart at zero.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..membership import State, config, forget, own, pending, shared
from .base import Memory, NamedTensors, zeros_like_flat


@dataclass
class ShiftState(State):
    """What a shift keeps by parameter name: flat float32 tensors, in unscaled units.

    Args:
        estimate: `h_i`, this worker's estimate of its own gradient.
        mean: `h = 1/W sum_i h_i`, the same bits on all workers.
        difference: the difference to send; after encoding, what the payload did not carry.
        sent: the difference before it was encoded.
        pending_mean: the next `h`, by name, until `commit`.
        pending: names of the tensors that were compensated since the last commit.
    """

    estimate: dict[str, Tensor] = own(tied=True)
    mean: dict[str, Tensor] = shared(tied=True)
    difference: dict[str, Tensor] = config()
    sent: dict[str, Tensor] = config()
    pending_mean: dict[str, Tensor] = pending(default_factory=dict)
    pending: set[str] = pending(default_factory=set)


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

    def compensate(self, state: ShiftState, name: str, gradient: Tensor, scale: float = 1.0) -> Tensor:
        difference = state.difference[name]
        flat = gradient.detach().reshape(-1).to(torch.float32)
        torch.sub(flat / scale, state.estimate[name], out=difference)
        # Encoding overwrites `difference` with its residual, and what was sent is the rest.
        state.sent[name].copy_(difference)
        state.pending.add(name)
        return difference

    def decoded(self, state: ShiftState, name: str, mean: Tensor, scale: float = 1.0, encoded: bool = True) -> None:
        """The result is h and the mean of the differences. Dense tensors keep their mean."""
        if encoded:
            difference = mean.reshape(-1) / scale
            # Not in place: a discarded round must leave h as it was.
            state.pending_mean[name] = state.mean[name] + difference * self.rate
            mean.copy_(((state.mean[name] + difference) * scale).view_as(mean))

    def commit(self, state: ShiftState) -> None:
        for name in state.pending:
            # The own payload is not decoded: values less residual are what it carried.
            state.estimate[name].add_(state.sent[name] - state.difference[name], alpha=self.rate)
        for name, mean in state.pending_mean.items():
            state.mean[name].copy_(mean)
        forget(state)
