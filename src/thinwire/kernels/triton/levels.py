"""Quantization to any levels in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .. import levels as family
from ..levels import Levels
from ..random import keys_on
from ..scales import MIN_SCALE
from .buckets import DECODER, ENCODER, decoder_rows, encoder_rows, find_codes, load_buckets, store_buckets
from .device import is_finite, load_codes, load_floats, position_of, uniform
from .launch import are_aligned, floats, launch
from .tiles import Tiles
from .variants import Variant, add_variant

__all__ = ["encode", "decode_add"]


def encode(xs: list[Tensor], out: Tensor, keys: list[int], levels: Levels, residuals: list[Tensor] | None) -> None:
    tiles = Tiles.of_buckets(levels.bucket_size)
    if tiles is None:
        return family._encode.reference(xs, out, keys, levels, residuals)
    device = out.device
    rows, num_tiles = encoder_rows(xs, residuals, device, tiles, levels.bits, levels.bucket_size)
    launch(
        _encode_buckets,
        num_tiles,
        device,
        *(rows, keys_on(keys, device), out, floats(device, levels.values), len(xs)),
        BITS=levels.bits,
        LEVELS=len(levels.values),
        LEAST=MIN_SCALE,
        L2=levels.norm == "l2",
        RESIDUAL=residuals is not None,
        ALIGNED=are_aligned(out),
        **tiles.constants,
    )


def decode_add(payload: Tensor, outs: list[Tensor], weight: float, levels: Levels) -> None:
    device, tiles = payload.device, Tiles.of_elements(levels.bucket_size)
    rows, num_tiles = decoder_rows(outs, device, tiles, levels.bits, levels.bucket_size)
    launch(
        _decode_add,
        num_tiles,
        device,
        *(rows, payload, floats(device, levels.values), len(outs), weight),
        BITS=levels.bits,
        LEVELS=len(levels.values),
        BUCKET=levels.bucket_size,
        ALIGNED=are_aligned(payload),
        **tiles.constants,
    )


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
    RESIDUAL: tl.constexpr,
    ALIGNED: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Each row of a tile is a bucket: find its scale, choose levels, pack, and write the residual in one pass."""
    segment, start, numel, offset, inside, x, scale = load_buckets(
        rows, payload, num_segments, LEAST, L2, ALIGNED, SIZE, WIDTH, ROWS
    )
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
    store_buckets(
        rows,
        payload,
        num_segments,
        segment,
        start,
        numel,
        offset,
        inside,
        code,
        lost,
        BITS,
        RESIDUAL,
        SIZE,
        WIDTH,
        ROWS,
    )


@triton.jit(do_not_specialize=["num_segments"])
def _decode_add(
    rows,
    payload,
    level_table,
    num_segments,
    weight,
    BITS: tl.constexpr,
    LEVELS: tl.constexpr,
    BUCKET: tl.constexpr,
    ALIGNED: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Add a payload to a tile; a corrupt code that names no level counts as the last one."""
    out_ptr, numel, offset, inside, scale_index, has_scale, first_byte = find_codes(
        rows, num_segments, BITS, BUCKET, SIZE, WIDTH, ROWS
    )
    codes = load_codes(payload + first_byte, (numel * BITS + 7) // 8, BITS, SIZE, WIDTH, ROWS)
    level = tl.load(level_table + tl.minimum(codes, LEVELS - 1))
    value = level * (load_floats(payload, scale_index, has_scale, ALIGNED) * weight)
    out = tl.load(out_ptr + offset, mask=inside, other=0.0)
    tl.store(out_ptr + offset, out + value, mask=inside)


# ---- what is compiled and counted without a GPU ----


def _add_variants(num_levels: int, bucket_size: int, norm: str) -> None:
    bits, tiles = (num_levels - 1).bit_length(), Tiles.of_elements(bucket_size)
    constants = {"BITS": bits, "LEVELS": num_levels, "ALIGNED": True, **tiles.constants}
    code_bytes = bits / 8 + 4 / bucket_size
    what = f"{num_levels} levels, buckets of {bucket_size}"
    add_variant(
        Variant(
            f"levels.encode: {what}, {norm}, residual",
            _encode_buckets,
            {**constants, "LEAST": MIN_SCALE, "L2": norm == "l2", "RESIDUAL": True},
            ENCODER,
            tiles.numel,
            least_bytes=8 + code_bytes,
            # Levels stay in the cache: one for each step of the search, two neighbours, and the chosen one.
            cached_bytes=4 * (bits + 3) + (4 if norm == "l2" else 0),
            loop_trips=min(32, tiles.width // 32),
        )
    )
    add_variant(
        Variant(
            f"levels.decode_add: {what}, {norm}",
            _decode_add,
            {**constants, "BUCKET": bucket_size},
            DECODER,
            tiles.numel,
            least_bytes=8 + code_bytes,
            cached_bytes=4,
        )
    )


_add_variants(16, 512, "l2")
_add_variants(7, 1000, "max")
