"""Random subsets of indices, a function of a key alone, in time proportional to the subset.

A keyed Feistel network permutes the power of two around `numel`; following 0, 1, ... through it until they fall below
`numel` ("cycle walking") makes distinct numbers. Source: Black and Rogaway, "Ciphers with arbitrary finite domains",
CT-RSA 2002.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .backend import kernel
from .checks import check_counts, check_length
from .random import hash_of

_ROUNDS, _MIN_BITS = 6, 8


def random_indices(
    keys: Sequence[int] | Tensor, counts: Sequence[int], numels: Sequence[int], device: torch.device | str = "cpu"
) -> Tensor:
    """`counts[i]` of `numels[i]` indices, every subset equally likely, a function of the key alone.

    Args:
        keys: one 64-bit key per segment; or an int64 tensor of them on `device`, whose values no host needs.
        counts: how many of each.
        numels: elements per segment.
        device: where.

    Returns:
        int32 indices, flat, ascending within their segment.

    Raises:
        ValueError: if a count is negative or exceeds its segment.

    Example:
        >>> from thinwire.kernels import mix_key
        >>> random_indices([mix_key(0, 0, 0)], [3], [1000])
        tensor([212, 447, 651], dtype=torch.int32)
    """
    check_counts(counts, numels)
    check_length("keys", range(len(keys)), len(counts))
    device = torch.device(device)
    keys = keys if isinstance(keys, Tensor) else list(keys)
    return _random_indices.on[device.type](keys, list(counts), list(numels), device)


# ---- the reference ----


@kernel
def _random_indices(keys: list[int] | Tensor, counts: list[int], numels: list[int], device: torch.device) -> Tensor:
    pieces = [torch.empty(0, dtype=torch.int64, device=device)]
    for key, count, numel in zip(keys, counts, numels, strict=True):
        excludes = 2 * count > numel  # then fewer are left out than kept
        # Marks, because the permutation gives numbers in any order, and indices must ascend.
        kept = torch.full((numel,), excludes, dtype=torch.bool, device=device)
        kept[_random_subset(key, numel - count if excludes else count, numel, device)] = not excludes
        pieces.append(kept.nonzero().flatten())
    return torch.cat(pieces).int()


def _random_subset(key: int | Tensor, count: int, numel: int, device: torch.device) -> Tensor:
    bits = num_bits(numel)
    numbers = _permute(key, torch.arange(count, device=device), bits)
    # On a GPU the host waits in each turn. Triton's kernel loops by itself.
    while bool((outside := numbers >= numel).any()):
        numbers = torch.where(outside, _permute(key, numbers, bits), numbers)
    return numbers


def num_bits(numel: int) -> int:
    """Bits of the numbers that are permuted for a segment."""
    return max(_MIN_BITS, (numel - 1).bit_length())


def _permute(key: int | Tensor, numbers: Tensor, bits: int) -> Tensor:
    """A Feistel network over numbers of `bits` bits."""
    low_bits = bits // 2
    high, low = numbers >> low_bits, numbers & ((1 << low_bits) - 1)
    for r in range(0, _ROUNDS, 2):
        # A half has at most 16 bits, so the round's number fits above it.
        high = high ^ (hash_of(key, (r << 16) | low) >> (32 - (bits - low_bits)))
        low = low ^ (hash_of(key, ((r + 1) << 16) | high) >> (32 - low_bits))
    return (high << low_bits) | low
