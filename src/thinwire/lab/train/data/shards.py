"""Who sees which examples: a worker's share of a data set, reshuffled every epoch.

Even. All workers draw the same permutation of the data set, a pure function of the seed and the epoch, and worker r of W takes
every W-th entry from the r-th on. So shares never overlap, are of equal size, and together cover the data set but for
the last `num_examples mod W` entries of the permutation.

Uneven. Examples are split once for all epochs. A fraction of them, drawn by the seed, goes to all workers alike; the
others are put in order, of their classes or of their positions in the data set, and cut into W consecutive pieces. So a
worker sees few classes, where decentralised methods differ. Shares are disjoint and of equal size here too.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import torch
from torch import Tensor

from ....kernels import mix_key

ORDER_STREAM = zlib.crc32(b"order of examples")
SPLIT_STREAM = zlib.crc32(b"split of examples")


class Split(NamedTuple):
    """Examples with their labels.

    Args:
        inputs: (N, ...) float32.
        labels: (N,) int64, the class of each.
    """

    inputs: Tensor
    labels: Tensor


def shard(num_examples: int, rank: int, size: int, seed: int, epoch: int, first: int = 0) -> Tensor:
    """Indices of one worker's share of the data set in one epoch, in the order of use.

    Args:
        num_examples: size N of the data set.
        rank, size: this worker, 0..W-1, of W.
        seed, epoch: which permutation.
        first: how many of its entries to leave out, because workers have seen them before.

    Returns:
        ((N - first) // W,) int64.

    Example:
        >>> shares = [shard(7, rank, 2, seed=0, epoch=0) for rank in range(2)]
        >>> len(shares[0]), len(shares[1]), len(set(torch.cat(shares).tolist()))
        (3, 3, 6)
    """
    return permutation(num_examples, seed, ORDER_STREAM, epoch)[first + rank :: size][: (num_examples - first) // size]


def uneven_shard(keys: Tensor, rank: int, size: int, seed: int, epoch: int, shuffled: float = 0.0) -> Tensor:
    """Indices of one worker's share, in the order of use, where examples of like keys go to the same workers.

    Args:
        keys: (N,) the keys to split by, such as the label of each example.
        rank, size: this worker, 0..W-1, of W.
        seed, epoch: who gets which examples of a class depends on the seed, their order on both.
        shuffled: fraction of the examples that all workers share alike.

    Returns:
        (N // W,) int64.

    Example:
        >>> labels = torch.tensor([1, 0, 1, 0])
        >>> [sorted(uneven_shard(labels, rank, 2, seed=0, epoch=0).tolist()) for rank in range(2)]
        [[1, 3], [0, 2]]
    """
    order = permutation(len(keys), seed, SPLIT_STREAM, 0)
    # A multiple of the number of workers, so that all get equally many.
    num_mixed = round(shuffled * len(keys) / size) * size
    mixed, others = order[:num_mixed], order[num_mixed:]
    # The sort is stable, so examples of one key stay in their random order.
    pieces = others[keys[others].argsort(stable=True)].tensor_split(size)
    share = torch.cat([mixed[rank::size], pieces[rank]])[: len(keys) // size]
    return share[permutation(len(share), seed, ORDER_STREAM | rank << 32, epoch)]


def contiguous_shard(num_examples: int, rank: int, size: int) -> Tensor:
    """Indices of one worker's share of data that must stay in order: the same consecutive examples in every epoch.

    Example:
        >>> [contiguous_shard(7, rank, 2).tolist() for rank in range(2)]
        [[0, 1, 2], [3, 4, 5]]
    """
    share = num_examples // size
    return torch.arange(rank * share, (rank + 1) * share)


def permutation(num_examples: int, seed: int, stream: int, epoch: int) -> Tensor:
    """A permutation of `range(num_examples)`, the same on all workers that ask for the same."""
    # Mixed, for PyTorch's generator on the CPU reads the low 32 bits of its seed alone.
    generator = torch.Generator().manual_seed(mix_key(seed, stream, epoch))
    return torch.randperm(num_examples, generator=generator)


def num_batches(num_examples: int, size: int, batch_size: int) -> int:
    """Steps in an epoch: full batches that every worker can make of its share.

    Raises:
        ValueError: a share is smaller than a batch.
    """
    batches = num_examples // size // batch_size
    if batches == 0:
        raise ValueError(
            f"batch_size {batch_size} on {size} workers needs {batch_size * size} training examples, but there are "
            f"{num_examples}; choose a batch_size of at most {num_examples // size}"
        )
    return batches
