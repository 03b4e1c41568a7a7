"""DIANA: unbiased compression of differences to running estimates, which take a part of each difference."""

from __future__ import annotations

from dataclasses import dataclass

from ..options import require_number
from .shift import Shift


@dataclass(frozen=True, repr=False)
class DIANA(Shift):
    """Sends the compressed difference to a running estimate of the own gradient; the mean gradient keeps its mean.

        c_i = C(grad_i - h_i)   is sent;   h_i <- h_i + a c_i;   h <- h + a 1/W sum_i c_i;   the result is h + 1/W sum_i c_i

    With an unbiased codec the result is an unbiased estimate of the mean gradient. On gradients that stay the same, or near
    an optimum, differences go to zero, and the noise of the codec with them. Costs four float32 copies of what is encoded.
    With a = 1 it is `EF21`. If workers join or leave a run, all estimates restart at zero.

    Args:
        alpha: a, in (0, 1]; at most `1 / (1 + v)` for a codec with `E|C(x) - x|^2 <= v |x|^2`. Lower => steadier estimates,
            which follow the gradients later.

    Raises:
        ValueError: alpha out of range.

    Source: Mishchenko et al. 2019, DIANA, arXiv 1901.09269.

    Example:
        >>> import torch, thinwire as tw
        >>> def worker(comm):
        ...     averager, x = tw.Mean(tw.codec.NaturalCompression(), tw.memory.DIANA(alpha=0.5), min_ndim=0), torch.zeros(2)
        ...     state = averager.init([("x", x)], comm)
        ...     for _ in range(40):
        ...         x.copy_(torch.tensor([3.0, 1.0]))
        ...         averager.step(state, [("x", x)], comm).wait()
        ...         averager.commit(state)
        ...     return x
        >>> tw.LocalWorld(2).run(worker)[0].round(decimals=3)
        tensor([3., 1.])
    """

    alpha: float = 0.5

    def __post_init__(self) -> None:
        require_number("DIANA: alpha", self.alpha, above=0, most=1)

    @property
    def rate(self) -> float:
        return self.alpha
