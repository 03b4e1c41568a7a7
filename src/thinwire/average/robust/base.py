"""The contract of a rule: what takes the place of the mean where some workers may be wrong.

A rule is a part of `Mean`, such as `Mean(QSGD(bits=4), rule=Krum(faulty=1))`. Every worker decodes the messages of all, and
combines them into one vector:

    rows           (k, n) float32: the messages of the k workers that take part, in rank order, all of them finite
    combine        returns the result, n elements, and what it clipped; it does not change the rows, and remembers nothing;
                   one row of huge numbers leaves the result finite

Who takes part. A worker whose message is not finite, or cannot be decoded, is left out of the round. One that was not
finite, or was clipped to less than half, for `patience` rounds in a row is set aside: it is named in a warning, and left out
from then on (`record.py`). Workers left out count as faulty ones, so `faulty` is as many fewer among the others.

Same bits. All workers must get the same result, also with different processors and numbers of threads. So rules add in an
order that depends on shapes alone: `dots` adds products in float64 as a tree, `weighted_sum` adds rows in their order.

Units. Rows are unscaled under a loss scaler, and so are thresholds. A round needs the whole model at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ...algorithm import Algorithm, require
from ...codec import Codec
from ...kernels.flags import in_main_memory
from ...options import require_integer

WIDTH = 1 << 14  # columns that `dots` adds up as one tree; these many float64 values of a few rows fit into a cache
AT_ONCE = 1 << 23  # elements of which `dots` makes trees at once where each operation is a launch


@dataclass(frozen=True)
class Messages:
    """What a rule combines.

    Attributes:
        rows: (k, n) float32, finite.
        numels: elements of each tensor; they add up to n.
        left_out: how many workers have no row.
        center: the last result, n elements; zeros in the first round. None for rules that do not ask for it.
        seed: of random numbers; the same on all workers, and another one in each round.
    """

    rows: Tensor
    numels: list[int]
    left_out: int = 0
    center: Tensor | None = None
    seed: int = 0

    def faulty(self, expected: int) -> int:
        """How many of the rows a rule should take for wrong, if it expects this many wrong workers."""
        return max(0, expected - self.left_out)


class Combined(NamedTuple):
    """What a rule returns.

    Attributes:
        result: float32, n elements.
        norms: the norm of what was clipped, of each row, float64; None if the rule does not clip.
        dropped: the norm of the part of it that clipping dropped.
    """

    result: Tensor
    norms: Tensor | None = None
    dropped: Tensor | None = None


@dataclass(frozen=True, repr=False)
class Rule(Algorithm, ABC):
    """What takes the place of the mean; the module's text is the contract.

    Args:
        patience: rounds in a row that a worker may be not finite, or clipped to less than half, before it is set aside;
            None never does so.

    Raises:
        ValueError: patience is not a positive integer.
    """

    patience: int | None = field(default=100, kw_only=True)

    def __post_init__(self) -> None:
        require_integer(f"{type(self).__name__}: patience", self.patience, 1, or_none=True)

    @property
    def has_center(self) -> bool:
        """Whether it starts from the last result."""
        return False

    @property
    def min_workers(self) -> int:
        """The fewest workers that it suits."""
        return 1

    def check_size(self, rank: int, size: int) -> None:
        """Raise ValueError unless it suits this many workers."""
        require(
            size >= self.min_workers,
            f"rank {rank}: {self} needs at least {self.min_workers} workers, got {size}; use more workers, or a rule for "
            "fewer wrong ones",
        )

    def check_codec(self, codec: Codec) -> None:  # noqa: B027 -- most rules suit every codec
        """Raise ValueError unless the rule is of use with what the codec sends."""

    @abstractmethod
    def combine(self, messages: Messages) -> Combined:
        """The result of a round."""


def dots(a: Tensor, b: Tensor) -> Tensor:
    """The products `sum_j a_ij b_ij`, float64, of rows of finite float32; the same bits on every device.

    Products of float32 are exact in float64, and the order of the sums depends on shapes alone.

    Args:
        a: (k, n).
        b: (k, n) or (n).

    Example:
        >>> dots(torch.tensor([[3.0, 4.0], [1.0, 0.0]]), torch.tensor([3.0, 4.0]))
        tensor([25.,  3.], dtype=torch.float64)
    """
    total = torch.zeros(len(a), dtype=torch.float64, device=a.device)
    whole = a.shape[-1] // WIDTH * WIDTH
    width = WIDTH if in_main_memory(a.device) else max(1, AT_ONCE // (WIDTH * len(a))) * WIDTH
    for x, y in zip(a[..., :whole].split(width, -1), b[..., :whole].split(width, -1), strict=True):
        for sums in _tree_sum((x.double() * y.double()).unflatten(-1, (-1, WIDTH))).unbind(-1):
            total += sums
    total += _tree_sum(a[..., whole:].double() * b[..., whole:].double())
    return total


def _tree_sum(x: Tensor) -> Tensor:
    """Sums over the last dimension, by halves."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        odd = x[..., 2 * half :]
        x = x[..., :half] + x[..., half : 2 * half]
        x = torch.cat([x, odd], -1) if odd.numel() else x
    return x.sum(-1)


def norms_of(rows: Tensor) -> Tensor:
    """The norm of each row, float64."""
    return dots(rows, rows).sqrt()


def gram(rows: Tensor) -> Tensor:
    """All products of two rows, (k, k) float64, on the CPU; distances and norms of all weighted sums follow from them.

    Example:
        >>> gram(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
        tensor([[5., 2.],
                [2., 1.]], dtype=torch.float64)
    """
    products = torch.zeros(len(rows), len(rows), dtype=torch.float64, device="cpu")
    for i, row in enumerate(rows):
        # Products are symmetric, so row i needs only those with itself and later rows.
        products[i, i:] = products[i:, i] = dots(rows[i:], row).cpu()
    return products


def weighted_sum(rows: Tensor, weights: Tensor) -> Tensor:
    """`sum_i weights[i] rows[i]`, in the order of the rows.

    Example:
        >>> weighted_sum(torch.tensor([[1.0, 2.0], [0.0, 1.0]]), torch.tensor([0.5, 1.0]))
        tensor([0.5000, 2.0000])
    """
    total = torch.zeros_like(rows[0])
    for row, weight in zip(rows, weights.tolist(), strict=True):
        total += row * weight  # not by `alpha`: some devices round that once and others twice
    return total


def mean_of_rows(rows: Tensor) -> Tensor:
    """The mean of the rows, added in their order."""
    return weighted_sum(rows, torch.full((len(rows),), 1 / len(rows), dtype=torch.float64, device="cpu"))


def clip_factors(norms: Tensor, tau: float | Tensor) -> Tensor:
    """`min(1, tau / norm)`, and 1 for a norm of 0."""
    return torch.where(norms > tau, tau / norms, torch.ones_like(norms))
