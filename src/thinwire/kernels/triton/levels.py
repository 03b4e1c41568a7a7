"""Quantization to any levels in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .. import levels as family
from ..flags import Flag
from ..levels import Levels
from ..random import keys_on
from ..scales import MIN_SCALE
from .block_sums import store_scales
from .buckets import (
    SIGNATURE,
    add_decoder_variants,
    bucket_rows,
    find_scales,
    find_tile,
    first_code,
    launch_decoder,
    load_total,
    scales_of_rows,
    store_tile,
    store_total,
)
from .device import is_finite, load_codes, load_floats, position_of, uniform
from .launch import are_aligned, floats, launch
from .tiles import Tiles
from .variants import Variant, add_variant


@family._encode.runs_on("triton")
def encode(xs: list[Tensor], out: Tensor, keys: list[int], levels: Levels, residuals: list[Tensor] | None) -> None:
    device, tiles = out.device, Tiles.of_elements(levels.bucket_size)
    if tiles.size != levels.bucket_size:
        store_scales(xs, out, levels.bucket_size, levels.norm, MIN_SCALE)
    rows, num_tiles = bucket_rows(xs, residuals, device, tiles, levels.bits, levels.bucket_size)
    launch(
        _encode_buckets,
        num_tiles,
        device,
        *(rows, keys_on(keys, device), out, floats(device, levels.values), len(xs)),
        BITS=levels.bits,
        LEVELS=len(levels.values),
        LEAST=MIN_SCALE,
        L2=levels.norm == "l2",
        BUCKET=levels.bucket_size,
        RESIDUAL=residuals is not None,
        ALIGNED=are_aligned(out),
        **tiles.constants,
    )


@family._decode_add.runs_on("triton")
def decode_add(payload: Tensor, outs: list[Tensor], weight: float, levels: Levels) -> None:
    _decode_payloads([payload], outs, weight, levels, add=True)


@family._decode_sum.runs_on("triton")
def decode_sum(payloads: list[Tensor], outs: list[Tensor], weight: float, levels: Levels) -> Flag:
    return _decode_payloads(payloads, outs, weight, levels, add=False)


def _decode_payloads(payloads: list[Tensor], outs: list[Tensor], weight: float, levels: Levels, add: bool) -> Flag:
    device, tiles = payloads[0].device, Tiles.of_elements(levels.bucket_size)
    rows = bucket_rows(outs, None, device, tiles, levels.bits, levels.bucket_size)
    level_table = floats(device, levels.values)
    constants = {"BITS": levels.bits, "LEVELS": len(levels.values), "BUCKET": levels.bucket_size, **tiles.constants}
    return launch_decoder(_decode, rows, payloads, outs, weight, add, constants, level_table)


@triton.jit(do_not_specialize=["num_segments"])
def _encode_buckets(
    rows,
    key_table,
    payload,
    level_table,
    num_segments,
    BITS: tl.constexpr,
    LEVELS: tl.constexpr,
    LEAST: tl.constexpr,
    L2: tl.constexpr,
    BUCKET: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ALIGNED: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Find the scales if rows are buckets, choose levels, pack, and write the residual in one pass."""
    segment, first_row, start, pointer, numel, offset, inside = find_tile(rows, num_segments, SIZE, WIDTH, ROWS)
    index, has_scale = find_scales(
        rows, num_segments, segment, first_row, start, numel, offset, inside, BUCKET, SIZE, ROWS
    )
    x = tl.load(pointer + offset, mask=inside, other=0.0)
    if SIZE == BUCKET:
        scale = scales_of_rows(pointer, x, numel, payload, index, has_scale, LEAST, L2, ALIGNED, SIZE, WIDTH, ROWS)
    else:
        scale = load_floats(payload, index, has_scale, ALIGNED)
    u = uniform(tl.load(key_table + segment), position_of(start, offset))
    usable = is_finite(scale) & (scale > 0)
    r = x * tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    # The last inner level that is at most r, found bit by bit from the highest; 0 if there is none.
    code = tl.zeros((ROWS, WIDTH), tl.int32)
    for i in tl.static_range(BITS):
        higher = code + (1 << (BITS - 1 - i))
        exists = higher <= LEVELS - 2
        level = tl.load(level_table + higher, mask=exists, other=0.0)
        code = tl.where(exists & (level <= r), higher, code)
    low = tl.load(level_table + code)
    up = (r - low > u * (tl.load(level_table + code + 1) - low)) & usable
    code = tl.where(usable, code + up.to(tl.int32), 0)
    lost = x - tl.load(level_table + code) * scale
    arguments = (rows, payload, num_segments, segment, start, numel, offset, inside, code, lost)
    store_tile(*arguments, BITS, RESIDUAL, SIZE, WIDTH, ROWS)


@triton.jit(do_not_specialize=["num_segments", "num_payloads"])
def _decode(
    rows,
    payloads,
    level_table,
    flag,
    num_segments,
    num_payloads,
    weight,
    BITS: tl.constexpr,
    LEVELS: tl.constexpr,
    BUCKET: tl.constexpr,
    ADD: tl.constexpr,
    ALIGNED: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Add payloads to a tile, or to zeros; a corrupt code that names no level counts as the last one."""
    segment, first_row, start, pointer, numel, offset, inside = find_tile(rows, num_segments, SIZE, WIDTH, ROWS)
    index, has_scale = find_scales(
        rows, num_segments, segment, first_row, start, numel, offset, inside, BUCKET, SIZE, ROWS
    )
    first_byte = first_code(rows, num_segments, segment, start, BITS)
    total = load_total(pointer + offset, inside, ADD)
    for i in range(1 if ADD else num_payloads):
        payload = tl.load(payloads + i).to(tl.pointer_type(tl.uint8))
        codes = load_codes(payload + first_byte, (numel * BITS + 7) // 8, BITS, SIZE, WIDTH, ROWS)
        level = tl.load(level_table + tl.minimum(codes, LEVELS - 1))
        total += level * (load_floats(payload, index, has_scale, ALIGNED) * weight)
    store_total(pointer + offset, inside, total, flag, ADD)


# ---- what is compiled and counted without a GPU ----


def _add_variants(num_levels: int, bucket_size: int, norm: str) -> None:
    bits, tiles = (num_levels - 1).bit_length(), Tiles.of_elements(bucket_size)
    constants = {"BITS": bits, "LEVELS": num_levels, "BUCKET": bucket_size, **tiles.constants}
    code_bytes = bits / 8 + 4 / bucket_size
    what = f"{num_levels} levels, buckets of {bucket_size}"
    add_variant(
        Variant(
            f"levels.encode: {what}, {norm}, residual",
            _encode_buckets,
            {**constants, "LEAST": MIN_SCALE, "L2": norm == "l2", "RESIDUAL": True, "ALIGNED": True},
            SIGNATURE,
            tiles.numel,
            least_bytes=8 + code_bytes,
            # Levels stay in the cache: one for each step of the search, two neighbours, and the chosen one.
            cached_bytes=4 * (bits + 3) + (4 if norm == "l2" else 0),
            loop_trips=min(32, tiles.width // 32),
        )
    )
    add_decoder_variants("levels", what, _decode, constants, tiles.numel, code_bytes, cached=4)


_add_variants(16, 512, "l2")
_add_variants(7, 1000, "max")
