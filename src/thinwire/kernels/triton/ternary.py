"""Ternary values in Triton: a program packs or unpacks a run of words, digit by digit."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import ternary as family
from ..checks import MAX_SEGMENT_NUMEL, device_of, num_buckets, numels_of
from ..flags import Flag
from ..random import keys_on
from ..scales import MIN_SCALE
from ..ternary import BLOCK_WORDS, Ternary
from .block_sums import block_sums, find_bucket, total_of
from .device import (
    find_segment,
    is_finite,
    load_floats,
    load_pointer,
    position_of,
    root,
    scale_of_magnitude,
    store_floats,
    uniform,
)
from .launch import Launch, are_aligned, kept, launch, launch_each, pointers, starts, table, tiles_of
from .payloads import WHOLE, launch_decoder, load_total, store_residual, store_total

TILE_WORDS = 512


@family._scales.runs_on("triton")
def scales(xs: list[Tensor], clip: float, bucket_size: int, num_scales: int) -> Tensor:
    device = device_of(xs)
    out = torch.empty(num_scales, dtype=torch.float32, device=device)
    limits = torch.empty(len(xs), dtype=torch.float32, device=device)
    clips = math.isfinite(clip)  # an infinite clip limits nothing, and so needs no moments
    if clips:
        moments = block_sums(xs, device, "moments", least_buckets=1)
        sizes = (len(xs), moments.num_blocks, clip)
        launch(_store_limits, len(xs), device, moments.rows, moments.sums, limits, *sizes, BUCKET=MAX_SEGMENT_NUMEL)
    blocks = block_sums(xs, device, "max", bucket_size)
    arguments = (blocks.rows, blocks.sums, limits, out, len(xs))
    launch(_store_scales, num_scales, device, *arguments, CLIPS=clips, LEAST=MIN_SCALE, BUCKET=bucket_size)
    return out


@family._encode.runs_on("triton")
def encode(
    xs: list[Tensor],
    scales: Tensor,
    out: Tensor,
    keys: list[int],
    ternary: Ternary,
    residuals: list[Tensor] | None,
) -> None:
    device = out.device
    arguments = (keys_on(keys, device), scales, out, len(xs))
    constants = _constants(ternary) | {"ALIGNED": are_aligned(out), "RESIDUAL": residuals is not None}
    launch_each(_encode, _launches(xs, residuals, device, ternary), device, *arguments, **constants)


@family._decode_add.runs_on("triton")
def decode_add(payload: Tensor, scales: Tensor, outs: list[Tensor], weight: float, ternary: Ternary) -> None:
    _decode_payloads([payload], [scales], outs, weight, ternary, add=True)


@family._decode_sum.runs_on("triton")
def decode_sum(
    payloads: list[Tensor], scales: list[Tensor], outs: list[Tensor], weight: float, ternary: Ternary
) -> Flag:
    return _decode_payloads(payloads, scales, outs, weight, ternary, add=False)


def _decode_payloads(
    payloads: list[Tensor], scales: list[Tensor], outs: list[Tensor], weight: float, ternary: Ternary, add: bool
) -> Flag:
    device = payloads[0].device
    launches, sources = _launches(outs, None, device, ternary), table(device, pointers(payloads), pointers(scales))
    return launch_decoder(_decode, launches, payloads, outs, weight, add, _constants(ternary), sources=sources)


def _launches(xs: list[Tensor], residuals: list[Tensor] | None, device: torch.device, ternary: Ternary) -> list[Launch]:
    return _plan(device, ternary, tuple(numels_of(xs)), pointers(xs), pointers(residuals, len(xs)))


@kept
def _plan(
    device: torch.device,
    ternary: Ternary,
    numels: tuple[int, ...],
    addresses: tuple[int, ...],
    residuals: tuple[int, ...],
) -> list[Launch]:
    code_bytes = [ternary.nbytes([n]) for n in numels]
    num_tiles = tiles_of(code_bytes, TILE_WORDS * (1 if ternary.base == 3 else 4))
    num_scales = [num_buckets([n], ternary.size) for n in numels]
    rows = [addresses, residuals, numels, starts(num_scales)[:-1], starts(code_bytes)[:-1]]
    # Digits of a block are as far apart as the block is wide, so no elements are read together.
    return [Launch.of(device, num_tiles, rows)]


def _constants(ternary: Ternary) -> dict[str, Any]:
    return {
        "BASE": ternary.base,
        "DIGITS": ternary.num_digits,
        "BUCKET": ternary.size,
        "BLOCK": BLOCK_WORDS,
        "TILE": TILE_WORDS,
    }


@triton.jit(do_not_specialize=["num_segments", "num_blocks"])
def _store_limits(rows, sums, limits, num_segments, num_blocks, clip, BUCKET: tl.constexpr):
    """One program per segment: `clip` standard deviations; infinity where that is zero or not finite."""
    _, size, first_block, blocks = find_bucket(rows, num_segments, BUCKET)
    total = total_of(sums + first_block, blocks, False)
    squares = total_of(sums + num_blocks + first_block, blocks, False)
    count = tl.maximum(size, 1).to(tl.float64)
    variance = (squares - total * total / count) / count
    usable = (variance > 0) & (variance < float("inf"))
    limit = tl.where(usable, clip * root(tl.where(usable, variance, 1.0)), float("inf"))
    tl.store(limits + tl.program_id(0), limit)


@triton.jit(do_not_specialize=["num_segments"])
def _store_scales(
    rows, sums, limits, scales, num_segments, CLIPS: tl.constexpr, LEAST: tl.constexpr, BUCKET: tl.constexpr
):
    """One program per bucket. Bits of floats that are not negative ascend like floats."""
    segment, _, first_block, blocks = find_bucket(rows, num_segments, BUCKET)
    largest = total_of(sums + first_block, blocks, True).to(tl.int32)
    if CLIPS:
        limit = tl.load(limits + segment).to(tl.int32, bitcast=True)
        largest = tl.where(largest < 0x7F800000, tl.minimum(largest, limit), largest)
    tl.store(scales + tl.program_id(0), scale_of_magnitude(largest, LEAST, float("inf")))


@triton.jit
def _find_words(rows, num_segments, DIGITS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """A tile of words.

    Returns the segment, its number of elements, each word, the first element of its block, its place in the block, and the
    words of the block.
    """
    segment, tile = find_segment(rows, num_segments)
    numel = tl.load(rows + 3 * num_segments + segment)
    word = tile * TILE + tl.arange(0, TILE)
    first = word // BLOCK * (BLOCK * DIGITS)
    width = tl.minimum(BLOCK, (numel - first + DIGITS - 1) // DIGITS)
    return segment, numel, word, first, word % BLOCK, width


@triton.jit
def _load_scales(rows, scales, num_segments, segment, position, inside, BUCKET: tl.constexpr):
    """The scale of each element, or of all."""
    scales += tl.load(rows + 4 * num_segments + segment)
    if BUCKET == WHOLE:
        scale = tl.load(scales)
    else:
        scale = tl.load(scales + position // BUCKET, mask=inside, other=0.0)
    return scale


@triton.jit(do_not_specialize=["num_segments"])
def _encode(
    rows,
    key_table,
    scales,
    payload,
    num_segments,
    BASE: tl.constexpr,
    DIGITS: tl.constexpr,
    BUCKET: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ALIGNED: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    segment, numel, word, first, place, width = _find_words(rows, num_segments, DIGITS, BLOCK, TILE)
    x_ptr = load_pointer(rows + num_segments + segment, VECTOR)
    key = tl.load(key_table + segment)
    packed = tl.zeros([TILE], tl.int32)
    for digit in tl.static_range(DIGITS):
        position = first + digit * width + place
        inside = (place < width) & (position < numel)
        x = tl.load(x_ptr + position, mask=inside, other=0.0)
        scale = _load_scales(rows, scales, num_segments, segment, position, inside, BUCKET)
        # `0 * segment` is a zero with a type, which `position_of` converts.
        u = uniform(key, position_of(0 * segment, position))
        r = x * tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
        usable = is_finite(scale) & (scale > 0)
        value = tl.where(usable, (u < r).to(tl.int32) - (u < -r).to(tl.int32), 0)
        # The format asks for digits of 0 beyond the last element.
        packed += tl.where(inside, (value + 1) * (BASE**digit), 0)
        if RESIDUAL:
            store_residual(rows, num_segments, segment, position, inside, x - value.to(tl.float32) * scale, VECTOR)
    address = payload + tl.load(rows + 5 * num_segments + segment)
    if BASE == 3:
        tl.store(address + word, packed.to(tl.uint8), mask=place < width)
    else:
        # As floats, which are four bytes too: `store_floats` takes any address.
        store_floats(address, word, packed.to(tl.float32, bitcast=True), place < width, ALIGNED)


@triton.jit(do_not_specialize=["num_segments", "num_payloads"])
def _decode(
    rows,
    sources,
    flag,
    num_segments,
    num_payloads,
    weight,
    BASE: tl.constexpr,
    DIGITS: tl.constexpr,
    BUCKET: tl.constexpr,
    ADD: tl.constexpr,
    ALIGNED: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Read each word once for each of its digits: from memory, and then from the cache."""
    segment, numel, word, first, place, width = _find_words(rows, num_segments, DIGITS, BLOCK, TILE)
    out = load_pointer(rows + num_segments + segment, VECTOR)
    first_byte = tl.load(rows + 5 * num_segments + segment)
    for digit in tl.static_range(DIGITS):
        position = first + digit * width + place
        inside = (place < width) & (position < numel)
        total = load_total(out + position, inside, ADD)
        for i in range(1 if ADD else num_payloads):
            address = tl.load(sources + i).to(tl.pointer_type(tl.uint8)) + first_byte
            scales = tl.load(sources + num_payloads + i).to(tl.pointer_type(tl.float32))
            if BASE == 3:
                packed = tl.load(address + word, mask=inside, other=0).to(tl.uint32)
            else:
                packed = load_floats(address, word, inside, ALIGNED).to(tl.uint32, bitcast=True)
            value = ((packed // (BASE**digit)) % BASE).to(tl.int32) - BASE // 2
            scale = _load_scales(rows, scales, num_segments, segment, position, inside, BUCKET)
            total += value.to(tl.float32) * (scale * weight)
        store_total(out + position, inside, total, flag, ADD)
