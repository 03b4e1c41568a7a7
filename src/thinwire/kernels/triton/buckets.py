"""What the quantizers share: payloads of a float32 scale per bucket, then bit-packed codes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..checks import numels_of
from .device import (
    find,
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
ENCODER = {"rows": "*i64", "key_table": "*i64", "payload": "*u8", "level_table": "*fp32", "num_segments": "i32"}
DECODER = {
    "rows": "*i64",
    "payload": "*u8",
    "payloads": "*i64",
    "level_table": "*fp32",
    "flag": "*i32",
    "num_segments": "i32",
    "num_payloads": "i32",
    "weight": "fp32",
}


def encoder_rows(
    xs: list[Tensor], residuals: list[Tensor] | None, device: torch.device, tiles: Tiles, bits: int, bucket_size: int
) -> tuple[Tensor, int]:
    """The table of an encoder, and the number of tiles.

    Rows: addresses of segments and residuals, sizes, first tiles, first scales, first bytes of codes.
    """
    numels = numels_of(xs)
    first_tile = starts([tiles.count(n) for n in numels])
    scales, codes = _sections(numels, bits, bucket_size)
    rows = table(device, pointers(xs), pointers(residuals, len(xs)), numels, first_tile[:-1], scales, codes)
    return rows, first_tile[-1]


def decoder_rows(
    outs: list[Tensor], device: torch.device, tiles: Tiles, bits: int, bucket_size: int
) -> tuple[Tensor, int]:
    """The table of a decoder, and the number of tiles.

    Rows: addresses of segments, sizes, first tiles, first scales, first bytes of codes.
    """
    numels = numels_of(outs)
    first_tile = starts([tiles.count(n) for n in numels])
    rows = table(device, pointers(outs), numels, first_tile[:-1], *_sections(numels, bits, bucket_size))
    return rows, first_tile[-1]


def _sections(numels: list[int], bits: int, bucket_size: int) -> tuple[list[int], list[int]]:
    """Of each segment in a payload: the index of its first scale, and the offset of its codes in bytes."""
    scales = starts([-(-n // bucket_size) for n in numels])
    return scales[:-1], starts([(n * bits + 7) // 8 for n in numels], offset=4 * scales[-1])[:-1]


@triton.jit
def load_buckets(
    rows,
    payload,
    num_segments,
    LEAST: tl.constexpr,
    L2: tl.constexpr,
    ALIGNED: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Load a tile whose rows are buckets, and store the buckets' scales.

    Returns the segment, the tile's start in it, the elements from there on, each element's offset, whether it is one,
    the elements (ROWS, WIDTH) and the scales (ROWS, 1).
    """
    tile = tl.program_id(0)
    segment = find(rows + 3 * num_segments, num_segments, tile)
    first_row = (tile - tl.load(rows + 3 * num_segments + segment)) * ROWS
    start = first_row * SIZE
    x_ptr = tl.load(rows + segment).to(tl.pointer_type(tl.float32)) + start
    numel = tl.load(rows + 2 * num_segments + segment) - start
    offset, inside = tile_offsets(SIZE, WIDTH, ROWS)
    inside = inside & (offset < numel)
    if L2:
        scale = scale_of_sums(sums_of_squares(x_ptr, numel, SIZE, WIDTH, ROWS), LEAST)
        x = tl.load(x_ptr + offset, mask=inside, other=0.0)
    else:
        x = tl.load(x_ptr + offset, mask=inside, other=0.0)
        scale = scale_of_magnitude(tl.max(magnitude(x), axis=1), LEAST)
    row = tl.arange(0, ROWS)
    scale_index = tl.load(rows + 4 * num_segments + segment) + first_row + row
    store_floats(payload, scale_index, scale, row * SIZE < numel, ALIGNED)
    return segment, start, numel, offset, inside, x, scale[:, None]


@triton.jit
def store_buckets(
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
    address = payload + tl.load(rows + 5 * num_segments + segment) + start * BITS // 8
    store_codes(address, tl.where(inside, codes, 0), (numel * BITS + 7) // 8, BITS, SIZE, WIDTH, ROWS)
    if RESIDUAL:
        residual_ptr = tl.load(rows + num_segments + segment).to(tl.pointer_type(tl.float32)) + start
        # The residual may be the segment itself: all threads have read x before any writes.
        tl.debug_barrier()
        tl.store(residual_ptr + offset, lost, mask=inside)


@triton.jit
def find_codes(
    rows,
    num_segments,
    BITS: tl.constexpr,
    BUCKET: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Where a decoder's tile lies.

    Returns the pointer to its first element, the elements from there on, each element's offset, whether it is one, the
    indices of the scales (one per row or per element), whether there is such a scale, and the offset of its first byte.
    """
    tile = tl.program_id(0)
    segment = find(rows + 2 * num_segments, num_segments, tile)
    first_row = (tile - tl.load(rows + 2 * num_segments + segment)) * ROWS
    start = first_row * SIZE
    out_ptr = tl.load(rows + segment).to(tl.pointer_type(tl.float32)) + start
    numel = tl.load(rows + num_segments + segment) - start
    offset, inside = tile_offsets(SIZE, WIDTH, ROWS)
    inside = inside & (offset < numel)
    first_scale = tl.load(rows + 3 * num_segments + segment)
    first_byte = tl.load(rows + 4 * num_segments + segment) + start * BITS // 8
    if SIZE == BUCKET:
        row = tl.arange(0, ROWS)[:, None]
        scale_index = first_scale + first_row + row
        has_scale = row * SIZE < numel
    else:
        scale_index = first_scale + ((start.to(tl.uint32) + offset.to(tl.uint32)) // BUCKET).to(tl.int64)
        has_scale = inside
    return out_ptr, numel, offset, inside, scale_index, has_scale, first_byte
