"""Who sees which examples: a worker's share of a data set, reshuffled every epoch.

All workers draw the same permutation of the data set, a pure function of the seed and the epoch, and worker r of W takes
every W-th entry from the r-th on. So shares never overlap, are of equal size, and together cover the data set but for
the last `num_examples mod W` entries of the permutation.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels import mix_key

ORDER_STREAM = zlib.crc32(b"order of examples")


class Split(NamedTuple):
    """Examples with their labels.

    Args:
        inputs: (N, ...) float32.
        labels: (N,) int64, the class of each.
    """

    inputs: Tensor
    labels: Tensor


def shard(num_examples: int, rank: int, size: int, seed: int, epoch: int) -> Tensor:
    """Indices of one worker's share of the data set in one epoch, in the order of use.

    Args:
        num_examples: size N of the data set.
        rank, size: this worker, 0..W-1, of W.
        seed, epoch: which permutation.

    Returns:
        (N // W,) int64.

    Example:
        >>> shares = [shard(7, rank, 2, seed=0, epoch=0) for rank in range(2)]
        >>> len(shares[0]), len(shares[1]), len(set(torch.cat(shares).tolist()))
        (3, 3, 6)
    """
    # Mixed, for PyTorch's generator on the CPU reads the low 32 bits of its seed alone.
    generator = torch.Generator().manual_seed(mix_key(seed, ORDER_STREAM, epoch))
    order = torch.randperm(num_examples, generator=generator)
    return order[rank::size][: num_examples // size]


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
