"""Ascending indices by the smallest of three codes: Elias-Fano, a bitmap, and packed gaps. The size depends on them.

The code of a segment begins with a byte that names it. Packed gaps come in blocks of 128: a byte with the number of
bits of the largest gap, then that many bits for each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import bits as bit
from .backend import kernel
from .checks import check_counts, counted_indices, vector
from .indices import check_ascending, nbytes, segment_code, segment_indices

BLOCK_GAPS = 128
_BY_SIZE, _BY_GAPS = 0, 1


def encode(indices: Tensor, counts: Sequence[int], numels: Sequence[int]) -> Tensor:
    """Code ascending indices, each segment by the smallest of Elias-Fano, a bitmap and packed gaps.

    Unlike `indices.encode`, the size depends on the indices. It is larger by at most a byte a segment, which names the
    code, and smaller where indices cluster. (A plain 32 bits an index is never smaller than Elias-Fano.)

    Args:
        indices: int32, flat, strictly ascending within each segment.
        counts: indices per segment.
        numels: elements per segment.

    Returns:
        A uint8 tensor, at most `sum(1 + indices.nbytes(k, n))` long.

    Raises:
        ValueError: if indices do not ascend or lie outside their segment.

    Example:
        >>> run = torch.arange(500, 1500, dtype=torch.int32)
        >>> encode(run, [1000], [1_000_000]).numel(), nbytes(1000, 1_000_000)
        (153, 1495)
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
    for i, (index, numel) in enumerate(zip(bit.split(indices.long(), counts), numels, strict=True)):
        check_ascending(i, index, numel)
        code = segment_code(index, numel)
        # Where none or all are kept, the code has no bytes, and gaps cannot be smaller.
        by_gaps = _gap_bytes(index) if code.numel() else code
        name, code = (_BY_GAPS, by_gaps) if by_gaps.numel() < code.numel() else (_BY_SIZE, code)
        codes += [torch.tensor([name], dtype=torch.uint8, device=indices.device), code]
    return torch.cat(codes)


@kernel
def _decode(payload: Tensor, counts: list[int], numels: list[int]) -> Tensor:
    pieces = [torch.empty(0, dtype=torch.int64, device=payload.device)]
    for i, (count, numel) in enumerate(zip(counts, numels, strict=True)):
        name, payload = (int(payload[0]), payload[1:]) if payload.numel() else (-1, payload)
        if name not in (_BY_SIZE, _BY_GAPS) or (name == _BY_GAPS and not count):
            raise ValueError("payload: expected the byte that names how indices are coded")
        if name == _BY_GAPS:
            index, payload = _read_gaps(payload, count, numel)
        elif payload.numel() < (size := nbytes(count, numel)):
            raise ValueError("payload: its indices are cut short")
        else:
            index, payload = segment_indices(i, payload[:size], count, numel), payload[size:]
        pieces.append(index)
    if payload.numel():
        raise ValueError("payload: bytes are left after the indices")
    return torch.cat(pieces).int()


def gaps(index: Tensor) -> Tensor:
    """Gaps between indices, less one."""
    return torch.diff(index, prepend=torch.full((1,), -1, device=index.device)) - 1


def _gap_bytes(index: Tensor) -> Tensor:
    blocks = []
    for block in gaps(index).split(BLOCK_GAPS):
        width = int(block.max()).bit_length()
        blocks += [torch.tensor([width], dtype=torch.uint8, device=index.device), bit.pack(bit.to_bits(block, width))]
    return torch.cat(blocks)


def _read_gaps(payload: Tensor, count: int, numel: int) -> tuple[Tensor, Tensor]:
    """Indices, and the bytes that follow them."""
    blocks = []
    for at in range(0, count, BLOCK_GAPS):
        size = min(BLOCK_GAPS, count - at)
        width = int(payload[0]) if payload.numel() else 32  # 32 is refused below
        num_bytes = (size * width + 7) // 8
        if width > 31 or payload.numel() <= num_bytes:
            raise ValueError("payload: its indices are corrupt")
        bits = bit.unpack(payload[1 : 1 + num_bytes])
        if bool(bits[size * width :].any()):
            raise ValueError("payload: its indices are corrupt")
        zeros = torch.zeros(size, dtype=torch.int64, device=payload.device)
        blocks.append(bit.from_bits(bits[: size * width], width) if width else zeros)
        payload = payload[1 + num_bytes :]
    index = torch.cat(blocks).add(1).cumsum(0) - 1
    if int(index[-1]) >= numel:
        raise ValueError("payload: its indices are corrupt")
    return index, payload
