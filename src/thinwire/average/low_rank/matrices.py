"""What averagers of low rank share: which tensors are matrices, where Q starts, bases, and all-reduces of many parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ... import kernels
from ...clock import Clock
from ...codec import Key
from ...comm import Communicator


def columns(t: Tensor) -> int:
    """m of the matrix that a tensor is seen as."""
    return max(1, t.numel() // max(1, t.shape[0])) if t.ndim > 1 else 1


def gains(t: Tensor, rank: int) -> bool:
    """Whether P and Q are smaller than the matrix itself. It implies r < n, m."""
    return t.ndim > 1 and rank * (t.shape[0] + columns(t)) < t.numel()


def warm_start(q: Tensor, seed: int, name: str, rank: int) -> Tensor:
    """Q' of the last step (r, m); missing rows are drawn, each from its own key."""
    keys = [Key.of(seed, name, 0, row).mixed() for row in range(len(q), rank)]
    fresh = [2.0 * kernels.uniform(key, q.shape[1], q.device)[None] - 1.0 for key in keys]
    return torch.cat([q[:rank], *fresh]) if fresh else q[:rank]


def by_shape(function: Callable[..., Tensor], first: Sequence[Tensor], *others: Sequence[Tensor]) -> list[Tensor]:
    """`function` of each tensor, and of those beside it in `others`: tensors of one shape go through it as one stack.

    A model has many matrices of few shapes, and each operation costs its call.
    """
    alike: dict[torch.Size, list[int]] = {}
    for i, t in enumerate(first):
        alike.setdefault(t.shape, []).append(i)
    results = dict[int, Tensor]()
    for members in alike.values():
        stacks = [torch.stack([ts[i] for i in members]) for ts in (first, *others)]
        results |= zip(members, function(*stacks).unbind(), strict=True)
    return [results[i] for i in range(len(first))]


def bases(ps: Sequence[Tensor]) -> list[Tensor]:
    """Orthonormal rows that span those of each P' (r, n), whatever its rank; unit vectors if it is zero."""
    return by_shape(kernels.low_rank.orthonormal, ps)


def scaled_each(ts: Sequence[Tensor], factors: Sequence[float]) -> list[Tensor]:
    """Each tensor times a factor of its own."""
    return list(torch._foreach_mul(list(ts), list(factors))) if ts else []


def all_reduce_parts(parts: list[Tensor], comm: Communicator, clock: Clock) -> Callable[[], list[Tensor]]:
    """Start one all-reduce of all parts; returns a function that waits and returns the sums."""
    if not parts:
        return list
    with clock("exchange"):
        handle = comm.all_reduce(torch.cat([part.reshape(-1) for part in parts]))

    def wait() -> list[Tensor]:
        with clock("wait"):
            sums = handle.wait().split([part.numel() for part in parts])
        return [total.view(part.shape) for total, part in zip(sums, parts, strict=True)]

    return wait
