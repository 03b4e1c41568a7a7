"""Ascending indices by the gaps between them, in a Rice code. The size depends on the indices.

Source: Rice and Plaunt 1971; Golomb 1966, Run-length encodings.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from . import bits as bit
from .backend import kernel
from .checks import check_counts, counted_indices, vector
from .indices import check_ascending
from .smallest import gaps


@lru_cache(maxsize=4096)
def low_bits(count: int, numel: int) -> int:
    """Width l of the low parts for `count` of `numel` indices, about `log2(numel / count)`.

    It minimises the bound `count * (l + 1) + floor((numel - count) / 2^l)`; the smallest among equals wins.
    """
    return min(range(31), key=lambda low: max_bits(count, numel, low))


def max_bits(count: int, numel: int, low: int) -> int:
    """Bits that no `count` indices exceed, because their gaps less one add up to `numel - count` at most."""
    return count * (low + 1) + ((numel - count) >> low)


def max_nbytes(count: int, numel: int) -> int:
    """Most bytes that `count` indices into `numel` elements take; at most `indices.nbytes(count, numel)`.

    Example:
        >>> max_nbytes(1000, 1_000_000)
        1494
    """
    if count in (0, numel):
        return 0
    return (max_bits(count, numel, low_bits(count, numel)) + 7) // 8


def encode(indices: Tensor, counts: Sequence[int], numels: Sequence[int]) -> Tensor:
    """Code ascending indices by the gaps between them, in a Rice code whose parameter l follows from counts and numels.

    With `g_j = index_j - index_(j-1) - 1`, a segment is `g_j >> l` in unary for all j, then the low l bits of each.

    Args:
        indices: int32, flat, strictly ascending within each segment.
        counts: indices per segment.
        numels: elements per segment.

    Returns:
        A uint8 tensor, at most `sum(max_nbytes(k, n))` long.

    Raises:
        ValueError: if indices do not ascend or lie outside their segment.

    Example:
        >>> encode(torch.tensor([3, 70], dtype=torch.int32), [2], [100])
        tensor([57,  4], dtype=torch.uint8)
    """
    check_counts(counts, numels)
    checked = counted_indices(indices, counts, indices.device)
    return _encode.on[indices.device.type](checked, list(counts), list(numels))


def decode(payload: Tensor, counts: Sequence[int], numels: Sequence[int]) -> Tensor:
    """The indices that `encode` coded, int32 and flat.

    Raises:
        ValueError: if the bytes hold anything but `counts[i]` ascending indices.
    """
    check_counts(counts, numels)
    payload = vector("payload", payload, torch.uint8, payload.device)
    return _decode.on[payload.device.type](payload, list(counts), list(numels))


# ---- the reference ----


@kernel
def _encode(indices: Tensor, counts: list[int], numels: list[int]) -> Tensor:
    codes = [torch.empty(0, dtype=torch.uint8, device=indices.device)]
    for i, (index, count, numel) in enumerate(zip(bit.split(indices.long(), counts), counts, numels, strict=True)):
        check_ascending(i, index, numel)
        if count in (0, numel):
            continue
        between, low = gaps(index), low_bits(count, numel)
        at = (between >> low).cumsum(0) + torch.arange(count, device=index.device)
        marks = torch.zeros(int(at[-1]) + 1, dtype=torch.uint8, device=index.device)
        marks[at] = 1
        codes.append(bit.pack(torch.cat([marks, bit.to_bits(between & ((1 << low) - 1), low)])))
    return torch.cat(codes)


@kernel
def _decode(payload: Tensor, counts: list[int], numels: list[int]) -> Tensor:
    pieces = [torch.empty(0, dtype=torch.int64, device=payload.device)]
    for count, numel in zip(counts, numels, strict=True):
        if count in (0, numel):
            index = torch.arange(count, device=payload.device)
        else:
            index, payload = _read(payload, count, numel)
        pieces.append(index)
    if payload.numel():
        raise ValueError("payload: bytes are left after the indices")
    return torch.cat(pieces).int()


def _read(payload: Tensor, count: int, numel: int) -> tuple[Tensor, Tensor]:
    """Indices, and the bytes that follow them."""
    low = low_bits(count, numel)
    # No code is longer. The bytes after it are those of later segments.
    bits = bit.unpack(payload[: max_nbytes(count, numel)])
    # Only `count` ones are marks: those after them are low parts.
    at = bits.nonzero().flatten()[:count]
    num_marks = int(at[-1]) + 1 if at.numel() == count else bits.numel()
    num_bits = num_marks + count * low
    num_bytes = (num_bits + 7) // 8
    if at.numel() < count or num_bits > bits.numel() or bool(bits[num_bits : 8 * num_bytes].any()):
        raise ValueError("payload: its indices are corrupt")
    lows = bit.from_bits(bits[num_marks:num_bits], low) if low else torch.zeros_like(at)
    index = (((gaps(at) << low) | lows) + 1).cumsum(0) - 1
    # Gaps are not negative, so the last index is the largest.
    if int(index[-1]) >= numel:
        raise ValueError("payload: its indices are corrupt")
    return index, payload[num_bytes:]
