"""What dense encoders and decoders share: the tile of a program, its scales, its codes, its residual, and its sum.

A payload holds float32 scales and then bit-packed codes. Its table has one column per segment and these rows: address,
address of the residual, size, first tile, index of the first scale, offset of the first code in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..checks import MAX_SEGMENT_NUMEL, numels_of
from .device import (
    find,
    is_finite,
    magnitude,
    scale_of_magnitude,
    scale_of_sums,
    store_codes,
    store_floats,
    sums_of_squares,
    tile_offsets,
)
from .launch import pointers, starts, table
from .tiles import Tiles

# Types of run-time arguments, for compiling without tensors.
SIGNATURE = {
    "rows": "*i64",
    "key_table": "*i64",
    "payload": "*u8",
    "payloads": "*i64",
    "scales": "*fp32",
    "level_table": "*fp32",
    "flag": "*i32",
    "num_segments": "i32",
    "num_payloads": "i32",
    "weight": "fp32",
}
WHOLE = tl.constexpr(MAX_SEGMENT_NUMEL)  # the size of a bucket that is its segment


def segment_rows(
    xs: list[Tensor],
    residuals: list[Tensor] | None,
    device: torch.device,
    num_tiles: Sequence[int],
    num_scales: Sequence[int],
    code_bytes: Sequence[int],
    first_byte: int,
) -> tuple[Tensor, int]:
    """The table of an encoder or a decoder, and the number of tiles.

    Args:
        xs: the segments.
        residuals: of an encoder.
        device: of the table.
        num_tiles: tiles of each segment.
        num_scales: scales of each segment.
        code_bytes: bytes of each segment's codes.
        first_byte: where the codes begin.
    """
    first_tile = starts(num_tiles)
    rows = table(
        device,
        pointers(xs),
        pointers(residuals, len(xs)),
        numels_of(xs),
        first_tile[:-1],
        starts(num_scales)[:-1],
        starts(code_bytes, first_byte)[:-1],
    )
    return rows, first_tile[-1]


def bucket_rows(
    xs: list[Tensor],
    residuals: list[Tensor] | None,
    device: torch.device,
    tiles: Tiles,
    bits: int,
    bucket_size: int,
    scale_bytes: int = 4,
) -> tuple[Tensor, int]:
    """`segment_rows` of a payload with `scale_bytes` of scales for each bucket and `bits` bits for each element."""
    numels = numels_of(xs)
    num_scales = [-(-n // bucket_size) for n in numels]
    num_tiles = [tiles.count(n) for n in numels]
    code_bytes = [(n * bits + 7) // 8 for n in numels]
    return segment_rows(xs, residuals, device, num_tiles, num_scales, code_bytes, scale_bytes * sum(num_scales))


@triton.jit
def find_tile(rows, num_segments, SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Where a program's tile lies.

    Returns the segment, the tile's first row and start in it, the pointer to the start, the elements from there on, each
    element's offset, and whether it is one.
    """
    tile = tl.program_id(0)
    segment = find(rows + 3 * num_segments, num_segments, tile)
    first_row = (tile - tl.load(rows + 3 * num_segments + segment)) * ROWS
    start = first_row * SIZE
    pointer = tl.load(rows + segment).to(tl.pointer_type(tl.float32)) + start
    numel = tl.load(rows + 2 * num_segments + segment) - start
    offset, inside = tile_offsets(SIZE, WIDTH, ROWS)
    return segment, first_row, start, pointer, numel, offset, inside & (offset < numel)


@triton.jit
def find_scales(
    rows,
    num_segments,
    segment,
    first_row,
    start,
    numel,
    offset,
    inside,
    BUCKET: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The indices of a tile's scales, one per row or per element, and whether there is such a scale."""
    first = tl.load(rows + 4 * num_segments + segment)
    row = tl.arange(0, ROWS)[:, None]
    if SIZE == BUCKET:
        index = first + first_row + row
        has_scale = row * SIZE < numel
    elif BUCKET == WHOLE:
        index = first + 0 * row
        has_scale = row * SIZE < numel
    else:
        index = first + ((start.to(tl.uint32) + offset.to(tl.uint32)) // BUCKET).to(tl.int64)
        has_scale = inside
    return index, has_scale


@triton.jit
def first_code(rows, num_segments, segment, start, BITS: tl.constexpr):
    """The offset of a tile's first code, in bytes."""
    return tl.load(rows + 5 * num_segments + segment) + start * BITS // 8


@triton.jit
def scales_of_rows(
    pointer,
    x,
    numel,
    payload,
    index,
    has_scale,
    LEAST: tl.constexpr,
    L2: tl.constexpr,
    ALIGNED: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Find and store the scales (ROWS, 1) of a tile whose rows are buckets."""
    if L2:
        scale = scale_of_sums(sums_of_squares(pointer, numel, SIZE, WIDTH, ROWS), LEAST)
    else:
        scale = scale_of_magnitude(tl.max(magnitude(x), axis=1), LEAST)
    scale = scale[:, None]
    store_floats(payload, index, scale, has_scale, ALIGNED)
    return scale


@triton.jit
def store_tile(
    rows,
    payload,
    num_segments,
    segment,
    start,
    numel,
    offset,
    inside,
    codes,
    lost,
    BITS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Store the codes of a tile, and what they lost as the residual."""
    address = payload + first_code(rows, num_segments, segment, start, BITS)
    store_codes(address, tl.where(inside, codes, 0), (numel * BITS + 7) // 8, BITS, SIZE, WIDTH, ROWS)
    if RESIDUAL:
        store_residual(rows, num_segments, segment, start + offset, inside, lost)


@triton.jit
def store_residual(rows, num_segments, segment, position, inside, lost):
    """Store what a tile's codes lost. The residual may be the segment: all threads have read it before any writes."""
    residual = tl.load(rows + num_segments + segment).to(tl.pointer_type(tl.float32))
    tl.debug_barrier()
    tl.store(residual + position, lost, mask=inside)


@triton.jit
def load_total(pointer, inside, ADD: tl.constexpr):
    """What a decoder adds payloads to: what is there, or zeros. `pointer` is a tensor of pointers."""
    if ADD:
        total = tl.load(pointer, mask=inside, other=0.0)
    else:
        total = tl.zeros(inside.shape, tl.float32)
    return total


@triton.jit
def store_total(pointer, inside, total, flag, ADD: tl.constexpr):
    """Store a sum. Set the flag if a sum of payloads is not finite: all programs set it to 1, so their order is free."""
    tl.store(pointer, total, mask=inside)
    if not ADD:
        finite = tl.min((is_finite(total) | (inside == 0)).to(tl.int32))
        tl.store(flag, 1, mask=finite == 0)


def sum_flag(device: torch.device, add: bool) -> Tensor:
    """The flag for `store_total`: an int32, cleared where it is used."""
    return torch.empty(1, dtype=torch.int32, device=device) if add else torch.zeros(1, dtype=torch.int32, device=device)
