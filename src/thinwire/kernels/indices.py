"""Ascending indices in a size that follows from counts alone: Elias-Fano or a bitmap, whichever is smaller.

Source: Elias, "Efficient storage and retrieval by content and address of static files", 1974; Fano, 1971.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from . import bits as bit
from .backend import kernel
from .checks import check_counts, counted_indices, payload_bytes
from .flags import Fault, demand


@lru_cache(maxsize=4096)
def low_bits(count: int, numel: int) -> int | None:
    """Width of the low part that makes `count` > 0 of `numel` indices smallest; None where a bitmap is no larger.

    `bits(l) = count * (l + 1) + floor((numel - 1) / 2^l)`; the smallest `l` among equals wins.
    """
    best = min(range(numel.bit_length()), key=lambda low: code_bits(count, numel, low))
    return best if code_bits(count, numel, best) < numel else None


def code_bits(count: int, numel: int, low: int) -> int:
    """Bits of the Elias-Fano code of `count` of `numel` indices: the high part in unary, then `low` bits of each."""
    return count * (low + 1) + ((numel - 1) >> low)


@lru_cache(maxsize=4096)
def nbytes(count: int, numel: int) -> int:
    """Bytes of `count` ascending indices into `numel` elements: the smaller of Elias-Fano and a bitmap.

    About `log2(numel / count) + 2` bits an index where few are kept, never more than a bit an element, and nothing
    where none or all are.

    Raises:
        ValueError: unless `0 <= count <= numel < 2^31`.

    Example:
        >>> nbytes(1000, 1_000_000) * 8 / 1000
        11.96
    """
    check_counts([count], [numel])
    if count in (0, numel):
        return 0
    low = low_bits(count, numel)
    return ((numel if low is None else code_bits(count, numel, low)) + 7) // 8


def encode(indices: Tensor, counts: Sequence[int], numels: Sequence[int], out: Tensor) -> None:
    """Code ascending indices, each segment by the smaller of Elias-Fano and a bitmap, or by nothing if all are there.

    Args:
        indices: int32, flat, strictly ascending within each segment.
        counts: indices per segment.
        numels: elements per segment.
        out: uint8 of `sum(nbytes(k, n))` bytes, written.

    Raises:
        ValueError: if indices do not ascend or lie outside their segment, or a buffer has the wrong size.

    Example:
        >>> out = torch.empty(nbytes(2, 100), dtype=torch.uint8)
        >>> encode(torch.tensor([3, 70], dtype=torch.int32), [2], [100], out)
        >>> decode(out, [2], [100])
        tensor([ 3, 70], dtype=torch.int32)
    """
    device = indices.device
    out = payload_bytes("out", out, _total_nbytes(counts, numels), device)
    _encode.on[device.type](counted_indices(indices, counts, device), list(counts), list(numels), out)


def decode(payload: Tensor, counts: Sequence[int], numels: Sequence[int]) -> Tensor:
    """The indices that `encode` coded, int32 and flat.

    Raises:
        ValueError: if the payload's size is wrong or its bytes hold anything but `counts[i]` ascending indices.
    """
    payload = payload_bytes("payload", payload, _total_nbytes(counts, numels), payload.device)
    return _decode.on[payload.device.type](payload, list(counts), list(numels))


def _total_nbytes(counts: Sequence[int], numels: Sequence[int]) -> int:
    check_counts(counts, numels)
    return sum(map(nbytes, counts, numels))


# ---- the reference ----


@kernel
def _encode(indices: Tensor, counts: list[int], numels: list[int], out: Tensor) -> None:
    codes = [torch.empty(0, dtype=torch.uint8, device=out.device)]
    for i, (index, numel) in enumerate(zip(bit.split(indices.long(), counts), numels, strict=True)):
        check_ascending(i, index, numel)
        codes.append(segment_code(index, numel))
    out.copy_(torch.cat(codes))


@kernel
def _decode(payload: Tensor, counts: list[int], numels: list[int]) -> Tensor:
    pieces = [torch.empty(0, dtype=torch.int64, device=payload.device)]
    for i, (count, numel) in enumerate(zip(counts, numels, strict=True)):
        code, payload = payload.tensor_split([nbytes(count, numel)])
        pieces.append(segment_indices(i, code, count, numel))
    return torch.cat(pieces).int()


def check_ascending(i: int, index: Tensor, numel: int) -> None:
    """Raise ValueError unless the indices of segment i ascend strictly inside it."""
    if index.numel() == 0:
        return
    # Where indices ascend, the first and the last tell whether all lie inside.
    demand(
        (index[0] >= 0) & (index[-1] < numel) & (index[1:] > index[:-1]).all(),
        Fault.UNSORTED,
        f"segment {i}: expected strictly ascending indices from 0 to {numel - 1}; sort them first",
    )


def segment_code(index: Tensor, numel: int) -> Tensor:
    """The bytes of one segment's indices (int64, ascending)."""
    count = index.numel()
    if count in (0, numel):
        return torch.empty(0, dtype=torch.uint8, device=index.device)
    index = index.clamp(0, numel - 1)  # what is outside is a fault, and must not be written elsewhere
    low = low_bits(count, numel)
    if low is None:
        marks = torch.zeros(numel, dtype=torch.uint8, device=index.device)
        marks[index] = 1
        return bit.pack(marks)
    high = torch.zeros(code_bits(count, numel, low) - count * low, dtype=torch.uint8, device=index.device)
    high[(index >> low) + torch.arange(count, device=index.device)] = 1
    return bit.pack(torch.cat([high, bit.to_bits(index & ((1 << low) - 1), low)]))


def segment_indices(i: int, code: Tensor, count: int, numel: int) -> Tensor:
    """Undo `segment_code` for segment i; a fault if no encoder writes these bytes."""
    if count in (0, numel):
        return torch.arange(count, device=code.device)
    index, is_valid = _read(bit.unpack(code), count, numel)
    message = f"segment {i}: expected {count} ascending indices below {numel}; the payload is corrupt"
    demand(is_valid, Fault.CORRUPT_INDICES, message)
    return index


def _read(bits: Tensor, count: int, numel: int) -> tuple[Tensor, Tensor]:
    """The indices that `bits` hold, all inside the segment, and whether an encoder writes these bits."""
    low = low_bits(count, numel)
    size = numel if low is None else code_bits(count, numel, low)
    marks = bits[: size if low is None else size - count * low]
    # Padding must be zero, so that each set of indices has one code only.
    index, is_valid = _positions(marks, count), (marks.sum() == count) & (bits[size:] == 0).all()
    if low is not None:
        index = (index - torch.arange(count, device=bits.device)) << low
        index = index + (bit.from_bits(bits[size - count * low : size], low) if low else 0)
        is_valid &= (index[-1] < numel) & (index[1:] > index[:-1]).all()
    return index.clamp(0, numel - 1), is_valid


def _positions(marks: Tensor, count: int) -> Tensor:
    """Where the first `count` ones are; `nonzero` would let the host wait for their number."""
    place = (marks.cumsum(0) - 1).where(marks > 0, torch.full((), count, device=marks.device))
    positions = torch.zeros(count + 1, dtype=torch.int64, device=marks.device)
    # Zeros, and ones beyond `count`, go to an extra last place, which is cut off.
    return positions.scatter_(0, place.clamp(max=count), torch.arange(marks.numel(), device=marks.device))[:count]
