"""How far workers' models are from their mean, and a context in which a model holds that mean."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ...comm import Communicator
from .joined import exchange_joined
from .models import broadcast_from_zero, unexpanded, values_of
from .shards import Replica


def consensus_distance(
    tensors: Sequence[Tensor], weight: float, comm: Communicator, shards: Replica | None = None
) -> float:
    """How far workers are from their mean: `sqrt(1/W sum_i |z_i - mean|^2)`, with `mean = 1/W sum_i w_i z_i`.

    All workers call it and get the same; costs an all-reduce of 8 bytes an element.

    Args:
        tensors: this worker's z_i.
        weight: w_i, 1.0 but for push-sum.
        comm: connects the workers.
        shards: the workers that hold the other shards of the tensors; None for none.

    Source: Kong et al. 2021, Consensus Control for Decentralized Deep Learning, arXiv 2102.04828.

    Example:
        >>> import thinwire as tw
        >>> tw.LocalWorld(2).run(lambda comm: consensus_distance([torch.tensor([2.0 * comm.rank])], 1.0, comm))
        [1.0, 1.0]
    """
    parts = [values_of(t).reshape(-1).to(torch.float64) for t in tensors]
    z = torch.cat(parts)
    mean = comm.all_reduce(z * weight).wait() / comm.size
    squares = (z - mean).square()
    own = squares.sum()
    if shards:  # the squares of all shards; elements that several of its workers hold count once
        each = squares.split([part.numel() for part in parts])
        own = own.new_tensor(shards.sum([part.sum() for part in each], tensors))
    squared: float = comm.all_reduce(own.view(1)).wait().item()
    return float((squared / comm.size) ** 0.5)


@contextmanager
def holding_mean(
    tensors: Sequence[Tensor], weight: float, buffers: Sequence[Tensor], comm: Communicator
) -> Iterator[None]:
    """Context in which `tensors` and `buffers` hold their means over all workers; both are restored at its end.

    Integer and boolean buffers, such as counters, hold rank 0's values.
    """
    own = [unexpanded(values_of(t)) for t in [*tensors, *buffers]]
    before = [t.clone() for t in own]
    statistics = own[len(tensors) :]
    try:
        with torch.no_grad():
            _store_mean(own[: len(tensors)], weight, comm)
            _store_mean([b for b in statistics if b.is_floating_point()], 1.0, comm)
            broadcast_from_zero([b for b in statistics if not b.is_floating_point()], comm)
        yield
    finally:
        for t, old in zip(own, before, strict=True):
            t.copy_(old)


def _store_mean(tensors: Sequence[Tensor], weight: float, comm: Communicator) -> None:
    # float64, so that the mean of equal models is that model, bit for bit.
    exchange_joined(
        tensors,
        lambda values: comm.all_reduce(values.mul_(weight)),
        lambda t, total: t.copy_(total / comm.size),
        torch.float64,
    )
