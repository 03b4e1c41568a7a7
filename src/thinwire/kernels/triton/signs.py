"""Payloads of a bit per element and one or two numbers per bucket in Triton; `sign` and `onebit` store the numbers."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..checks import MAX_SEGMENT_NUMEL
from ..flags import Flag
from .buckets import (
    SIGNATURE,
    add_decoder_variants,
    bucket_rows,
    find_scales,
    find_tile,
    first_code,
    launch_decoder,
    load_total,
    segment_rows,
    store_tile,
    store_total,
)
from .device import load_codes, load_floats, negated
from .launch import are_aligned, launch
from .tiles import Tiles
from .variants import Variant, add_variant


def encode_signs(xs: list[Tensor], out: Tensor, residuals: list[Tensor] | None, bucket_size: int, two: bool) -> None:
    """Write the signs after the numbers, which the payload already holds; and the residuals.

    Args:
        xs: the segments.
        out: the payload.
        residuals: where given, receive what the payload lacks.
        bucket_size: elements that share the numbers.
        two: whether a bucket has two numbers, for negative elements and for others; else they are `-scale` and `scale`.
    """
    tiles = Tiles.of_elements(bucket_size)
    rows, num_tiles = _rows(xs, residuals, out.device, tiles, bucket_size, two)
    constants = _constants(bucket_size, two, tiles) | {"ALIGNED": are_aligned(out)}
    launch(_encode, num_tiles, out.device, rows, out, len(xs), RESIDUAL=residuals is not None, **constants)


def decode_signs(
    payloads: list[Tensor], outs: list[Tensor], weight: float, bucket_size: int, two: bool, add: bool
) -> Flag:
    """Add one payload, or overwrite with the sum of several; returns whether the sum is finite."""
    tiles = Tiles.of_elements(bucket_size)
    rows = _rows(outs, None, payloads[0].device, tiles, bucket_size, two)
    return launch_decoder(_decode, rows, payloads, outs, weight, add, _constants(bucket_size, two, tiles))


def _rows(
    xs: list[Tensor],
    residuals: list[Tensor] | None,
    device: torch.device,
    tiles: Tiles,
    bucket_size: int,
    two: bool,
) -> tuple[Tensor, int]:
    if two:
        return bucket_rows(xs, residuals, device, tiles, 1, bucket_size, scale_bytes=8)
    num_tiles = [tiles.count(x.numel()) for x in xs]
    code_bytes = [(x.numel() + 7) // 8 for x in xs]
    return segment_rows(xs, residuals, device, num_tiles, [1] * len(xs), code_bytes, 4 * len(xs))


def _constants(bucket_size: int, two: bool, tiles: Tiles) -> dict[str, Any]:
    return {"BUCKET": bucket_size, "TWO": two, **tiles.constants}


@triton.jit
def _load_numbers(payload, index, has_scale, TWO: tl.constexpr, ALIGNED: tl.constexpr):
    """What negative elements become, and what others become."""
    if TWO:
        low = load_floats(payload, 2 * index, has_scale, ALIGNED)
        high = load_floats(payload, 2 * index + 1, has_scale, ALIGNED)
    else:
        high = load_floats(payload, index, has_scale, ALIGNED)
        low = negated(high)
    return low, high


@triton.jit(do_not_specialize=["num_segments"])
def _encode(
    rows,
    payload,
    num_segments,
    BUCKET: tl.constexpr,
    TWO: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ALIGNED: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    segment, first_row, start, pointer, numel, offset, inside = find_tile(rows, num_segments, SIZE, WIDTH, ROWS)
    x = tl.load(pointer + offset, mask=inside, other=0.0)
    lost = x
    if RESIDUAL:
        index, has_scale = find_scales(
            rows, num_segments, segment, first_row, start, numel, offset, inside, BUCKET, SIZE, ROWS
        )
        low, high = _load_numbers(payload, index, has_scale, TWO, ALIGNED)
        lost = x - tl.where(x < 0, low, high)
    arguments = (rows, payload, num_segments, segment, start, numel, offset, inside, (x < 0).to(tl.int32), lost)
    store_tile(*arguments, 1, RESIDUAL, SIZE, WIDTH, ROWS)


@triton.jit(do_not_specialize=["num_segments", "num_payloads"])
def _decode(
    rows,
    payloads,
    flag,
    num_segments,
    num_payloads,
    weight,
    BUCKET: tl.constexpr,
    TWO: tl.constexpr,
    ADD: tl.constexpr,
    ALIGNED: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    segment, first_row, start, pointer, numel, offset, inside = find_tile(rows, num_segments, SIZE, WIDTH, ROWS)
    index, has_scale = find_scales(
        rows, num_segments, segment, first_row, start, numel, offset, inside, BUCKET, SIZE, ROWS
    )
    first_byte = first_code(rows, num_segments, segment, start, 1)
    total = load_total(pointer + offset, inside, ADD)
    for i in range(1 if ADD else num_payloads):
        payload = tl.load(payloads + i).to(tl.pointer_type(tl.uint8))
        negative = load_codes(payload + first_byte, (numel + 7) // 8, 1, SIZE, WIDTH, ROWS)
        low, high = _load_numbers(payload, index, has_scale, TWO, ALIGNED)
        total += tl.where(negative != 0, low * weight, high * weight)
    store_total(pointer + offset, inside, total, flag, ADD)


# ---- what is compiled and counted without a GPU ----


def _add_variants(family: str, two: bool, bucket_size: int, buckets: str) -> None:
    tiles = Tiles.of_elements(bucket_size)
    constants = _constants(bucket_size, two, tiles)
    add_variant(
        Variant(
            f"{family}.encode: {buckets}, residual",
            _encode,
            {**constants, "RESIDUAL": True, "ALIGNED": True},
            SIGNATURE,
            tiles.numel,
            least_bytes=8 + 1 / 8,
            launches=3,
        )
    )
    add_decoder_variants(family, buckets, _decode, constants, tiles.numel, 1 / 8)


_add_variants("sign", False, MAX_SEGMENT_NUMEL, "whole segments")
_add_variants("onebit", True, 512, "buckets of 512")
