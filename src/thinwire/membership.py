"""What becomes of memory when the number of workers changes: the rules that memories, averagers and strategies share.

A worker remembers two kinds of things, and each memory and averager declares which is which:

    own       this worker's alone, such as the residual of error feedback
    shared    the same on all workers, such as adaptive levels, PowerSGD's Q, an outer optimizer

Own memory is late gradient: what worker i keeps as e_i enters the parameters as `1/W sum_i e_i`. So this mean is the total
that is kept when W changes, not the plain sum: with the sum alone, late gradients would weigh W/W' times what they are worth.

    1/W' sum_j e'_j  =  1/W sum_i e_i
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def dealt(parts: Sequence[Tensor], rank: int, size: int) -> Tensor:
    """The part of worker `rank` of `size` in the own memory of W workers, so that the mean over workers is kept.

    With fewer workers than before, a worker takes over the memories of several; with more, several share one. As many
    workers as before keep their own, bit for bit.

    Args:
        parts: e_0 ... e_(W-1), in one shape.
        rank: of the worker that gets the result, 0..size-1.
        size: the new number of workers, W'.

    Returns:
        e'_rank, a new tensor.

    Example:
        >>> parts = [torch.tensor([float(value)]) for value in (1, 2, 3, 6)]  # their mean is 3
        >>> [dealt(parts, rank, 2).item() for rank in range(2)], [dealt(parts, rank, 8).item() for rank in range(8)][:4]
        ([2.0, 4.0], [1.0, 2.0, 3.0, 6.0])
    """
    before = len(parts)
    taken = parts[rank::size] if size <= before else [parts[rank % before]]
    sharers = len(range(rank % before, size, before))
    factor = size / (before * sharers) if size > before else size / before
    total = taken[0].clone()
    for part in taken[1:]:
        total += part
    return total if factor == 1.0 else total * factor


def mean_of(states: Sequence[Any]) -> Any:
    """The mean of equally built states: of their floating-point tensors, element by element. All else is the first one's.

    Example:
        >>> mean_of([{"momentum": torch.tensor([1.0]), "steps": 3}, {"momentum": torch.tensor([2.0]), "steps": 3}])
        {'momentum': tensor([1.5000]), 'steps': 3}
    """
    first = states[0]
    if isinstance(first, Tensor):
        if not first.is_floating_point():
            return first.clone()
        return torch.stack([state.double() for state in states]).mean(0).to(first.dtype)
    if isinstance(first, Mapping):
        return {key: mean_of([state[key] for state in states]) for key in first}
    if isinstance(first, (list, tuple)):
        return type(first)(mean_of(list(items)) for items in zip(*states, strict=True))
    return first


def norm_of(tensors: Iterable[Tensor]) -> float:
    """The Euclidean norm of all elements together.

    Example:
        >>> norm_of([torch.tensor([3.0]), torch.tensor([4.0])])
        5.0
    """
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors))
