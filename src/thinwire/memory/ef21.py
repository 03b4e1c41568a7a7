"""EF21: workers send compressed differences to their own running estimates, and average these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .shift import Shift


@dataclass(frozen=True, repr=False)
class EF21(Shift):
    """Sends the compressed difference to a running estimate of the own gradient, and averages the estimates.

        c_i = C(grad_i - g_i)   is sent;   g_i <- g_i + c_i;   g <- g + 1/W sum_i c_i;   the result is g

    The estimates start at zero. On a gradient that stays the same they converge to it, with any codec that loses less
    than it carries, `|x - C(x)|^2 <= (1 - a) |x|^2` with a > 0, such as `TopK`. Unlike error feedback it needs no bound
    on how much gradients differ between workers. Costs four float32 copies of what is encoded.

    If workers join or leave a run, g is no longer the mean of those that take part, so all estimates restart at zero.

    Source: Richtarik, Sokolov and Fatkhullin 2021, EF21, arXiv 2106.05203.

    Example:
        >>> import torch, thinwire as tw
        >>> def worker(comm):
        ...     averager, x = tw.Mean(tw.TopK(0.5), tw.memory.EF21(), min_ndim=0), torch.zeros(2)
        ...     state = averager.init([("x", x)], comm)
        ...     for _ in range(2):
        ...         x.copy_(torch.tensor([3.0, 1.0]))
        ...         averager.step(state, [("x", x)], comm).wait()
        ...         averager.commit(state)
        ...     return x
        >>> tw.LocalWorld(2).run(worker)[0]  # the second round sent the other element
        tensor([3., 1.])
    """

    rate: ClassVar[float] = 1.0
