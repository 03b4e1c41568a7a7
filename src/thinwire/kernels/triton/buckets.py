"""What dense encoders and decoders share: the tile of a program, its scales, its codes, its residual, and its sum.

A payload holds float32 scales and then bit-packed codes. Its table has one column per segment and these rows: address,
address of the residual, size, first tile, index of the first scale, offset of the first code in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..checks import MAX_SEGMENT_NUMEL, numels_of
from ..flags import Flag, flag_of
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
from .launch import are_aligned, launch, pointers, starts, table
from .tiles import Tiles
from .variants import Variant, add_variant

# Types of run-time arguments, for compiling without tensors.
SIGNATURE = {
    "rows": "*i64",
    "key_table": "*i64",
    "payload": "*u8",
    "payloads": "*i64",
    "sources": "*i64",
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


def launch_decoder(
    decoder: Any,
    tiles: tuple[Tensor, int],
    payloads: list[Tensor],
    outs: list[Tensor],
    weight: float,
    add: bool,
    constants: Mapping[str, Any],
    *tables: Tensor,
    sources: Tensor | None = None,
) -> Flag:
    """Add one payload to `outs`, or overwrite them with the sum of several; returns whether the sum is finite.

    Args:
        decoder: the kernel. It gets `rows, sources, *tables, flag, num_segments, num_payloads, weight`.
        tiles: the table of the segments, and the number of programs.
        payloads: what to add.
        outs: the segments.
        weight: factor of all values.
        add: whether to keep what is there, and add the one payload.
        constants: of this kind of decoder.
        tables: of this kind of decoder.
        sources: by default, the addresses of the payloads.
    """
    device, (rows, num_tiles) = payloads[0].device, tiles
    flag = (torch.empty if add else torch.zeros)(1, dtype=torch.int32, device=device)  # 1 where a sum is not finite
    sources = table(device, pointers(payloads)) if sources is None else sources
    arguments = (rows, sources, *tables, flag, len(outs), len(payloads), weight)
    launch(decoder, num_tiles, device, *arguments, ADD=add, ALIGNED=are_aligned(*payloads), **constants)
    return True if add else flag_of(flag[0] == 0)


def add_decoder_variants(
    family: str,
    what: str,
    decoder: Any,
    constants: Mapping[str, Any],
    numel: int,
    code_bytes: float,
    cached: float = 0.0,
) -> None:
    """List a decoder for the compile tests: as `decode_add`, and as `decode_sum` of one payload.

    Args:
        family: the file of kernels.
        what: describes the constants.
        decoder: the kernel.
        constants: its constants, without `ADD` and `ALIGNED`.
        numel: elements that one program serves.
        code_bytes: of a payload, per element.
        cached: bytes per element that the program reads a second time.
    """
    for add in (True, False):
        add_variant(
            Variant(
                f"{family}.{'decode_add' if add else 'decode_sum, one payload'}: {what}",
                decoder,
                {**constants, "ALIGNED": True, "ADD": add},
                SIGNATURE,
                numel,
                least_bytes=4 + 4 * add + code_bytes,
                cached_bytes=cached,
            )
        )
