"""What averagers of low rank share: which tensors are matrices, where Q starts, bases, and all-reduces of many parts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ... import kernels
from ...clock import Clock
from ...codec import Key
from ...comm import Communicator


def columns(t: Tensor) -> int:
    """m of the matrix that a tensor is seen as."""
    return max(1, t[0].numel() if t.ndim > 1 and len(t) else 1)


def gains(t: Tensor, rank: int) -> bool:
    """Whether P and Q are smaller than the matrix itself. It implies r < n, m."""
    return t.ndim > 1 and rank * (len(t) + columns(t)) < t.numel()


def warm_start(q: Tensor, seed: int, name: str, rank: int) -> Tensor:
    """Q' of the last step (r, m); missing rows are drawn, each from its own key."""
    keys = [Key.of(seed, name, 0, row).mixed() for row in range(len(q), rank)]
    fresh = [2.0 * kernels.uniform(key, q.shape[1], q.device)[None] - 1.0 for key in keys]
    return torch.cat([q[:rank], *fresh])


def bases(ps: list[Tensor]) -> list[Tensor]:
    """Orthonormal rows that span those of each P' (r, n), whatever its rank; unit vectors if it is zero.

    Matrices of one shape go through the decomposition together.
    """
    alike: dict[torch.Size, list[int]] = {}
    for i, p in enumerate(ps):
        alike.setdefault(p.shape, []).append(i)
    bases = dict[int, Tensor]()
    for members in alike.values():
        q = kernels.low_rank.orthonormal(torch.stack([ps[i].t() for i in members]))
        bases |= zip(members, q.mT.contiguous(), strict=True)
    return [bases[i] for i in range(len(ps))]


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
