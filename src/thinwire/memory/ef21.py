"""EF21: workers send compressed differences to their own running estimates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .base import Memory, NamedTensors, load_buffers, zeros_like_flat


@dataclass
class EF21State:
    """What EF21 keeps by parameter name: flat float32 tensors, in unscaled units.

    Args:
        estimate: `g_i`, this worker's estimate of its own gradient.
        mean: `g = 1/W sum_i g_i`, the same bits on all workers.
        difference: the difference to send; after encoding, what the payload did not carry.
        sent: the difference before it was encoded.
        pending_mean: the next `g`, by name, until `commit`.
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
        load_buffers(self._buffers(), saved, "EF21 memory")
        self.forget()

    def forget(self) -> None:
        """Drop what is pending."""
        self.pending.clear()
        self.pending_mean.clear()

    def _buffers(self) -> dict[str, Tensor]:
        estimates = {f"{name}.estimate": buffer for name, buffer in self.estimate.items()}
        return estimates | {f"{name}.mean": buffer for name, buffer in self.mean.items()}


@dataclass(frozen=True, repr=False)
class EF21(Memory):
    """Sends the compressed difference to a running estimate of the own gradient, and averages the estimates.

        c_i = C(grad_i - g_i)   is sent;   g_i <- g_i + c_i;   g <- g + 1/W sum_i c_i;   the result is g

    The estimates start at zero. On a gradient that stays the same they converge to it, with any codec that loses less
    than it carries, `|x - C(x)|^2 <= (1 - a) |x|^2` with a > 0, such as `TopK`. Unlike error feedback it needs no bound
    on how much gradients differ between workers. Costs four float32 copies of what is encoded.

    Every `g_i` is a worker's own, and g is shared. If workers join or leave a run, g is no longer the mean of those that
    take part, so all estimates restart at zero.

    Source: Richtarik, Sokolov and Fatkhullin 2021, EF21, arXiv 2106.05203.

    Example:
        >>> import torch, thinwire as tw
        >>> def worker(comm):
        ...     averager, x = tw.Mean(tw.TopK(0.5), tw.EF21(), min_ndim=0), torch.zeros(2)
        ...     state = averager.init([("x", x)], comm)
        ...     for _ in range(2):
        ...         x.copy_(torch.tensor([3.0, 1.0]))
        ...         averager.step(state, [("x", x)], comm).wait()
        ...         averager.commit(state)
        ...     return x
        >>> tw.LocalWorld(2).run(worker)[0]  # the second round sent the other element
        tensor([3., 1.])
    """

    def init(self, tensors: NamedTensors, dense: NamedTensors = ()) -> EF21State:
        buffers = [zeros_like_flat(tensors) for _ in range(4)]
        return EF21State(buffers[0], buffers[1], buffers[2], buffers[3])

    def is_shared(self, key: str, saved: Mapping[str, Tensor]) -> bool:
        return key.endswith(".mean")

    def regroup(self, state: EF21State) -> None:
        for buffer in (*state.estimate.values(), *state.mean.values()):
            buffer.zero_()
        state.forget()

    def compensate(self, state: EF21State, name: str, gradient: Tensor, scale: float = 1.0) -> Tensor:
        difference = state.difference[name]
        flat = gradient.detach().reshape(-1).to(torch.float32)
        torch.sub(flat / scale, state.estimate[name], out=difference)
        state.sent[name].copy_(difference)
        state.pending.add(name)
        return difference

    def decoded(self, state: EF21State, name: str, mean: Tensor, scale: float = 1.0, encoded: bool = True) -> None:
        """Add the mean of the differences to g; the result is the new g. Dense tensors keep their mean."""
        if encoded:
            state.pending_mean[name] = state.mean[name] + mean.reshape(-1) / scale
            mean.copy_((state.pending_mean[name] * scale).view(mean.shape))

    def commit(self, state: EF21State) -> None:
        for name in state.pending:
            state.estimate[name] += state.sent[name] - state.difference[name]
        for name, mean in state.pending_mean.items():
            state.mean[name].copy_(mean)
        state.forget()

    def discard(self, state: EF21State) -> None:
        state.forget()
