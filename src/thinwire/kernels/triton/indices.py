"""Elias-Fano codes and bitmaps of ascending indices in Triton.

Encoding is one launch. Each program makes a run of bytes: it finds the first index that sets a bit in a byte by binary
search, so that no byte has two writers. Decoding is three launches: count the ones of each tile, sum the counts up, and
write each one's index at its rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...streams import uploaded
from .. import indices as family
from ..flags import Fault, fault_counters
from ..indices import code_bits, low_bits, nbytes
from .device import find_segment
from .fields import SCAN_BLOCK, load_field, scan
from .launch import Launch, kept, launch, starts, tiles_of

BYTES = 128
CORRUPT, UNSORTED = tl.constexpr(int(Fault.CORRUPT_INDICES)), tl.constexpr(int(Fault.UNSORTED))


@family._encode.runs_on("triton")
def encode(indices: Tensor, counts: list[int], numels: list[int], out: Tensor) -> None:
    plan = _plan_encoder(out.device, tuple(counts), tuple(numels))
    faults = fault_counters(out.device)
    steps = max(counts, default=0).bit_length()
    launch(_encode, plan.num_tiles, out.device, plan.rows, indices, out, faults, len(counts), steps, BYTES=BYTES)


@family._decode.runs_on("triton")
def decode(payload: Tensor, counts: list[int], numels: list[int]) -> Tensor:
    device = payload.device
    plan, first = _plan_decoder(device, tuple(counts), tuple(numels))
    # Zeros, because a corrupt payload leaves some of them unwritten.
    indices = torch.zeros(sum(counts), dtype=torch.int32, device=device)
    before = torch.empty(plan.num_tiles, dtype=torch.int32, device=device)
    totals = torch.empty(len(counts), dtype=torch.int32, device=device)
    faults = fault_counters(device)
    launch(_count_ones, plan.num_tiles, device, plan.rows, payload, before, len(counts), BYTES=BYTES)
    launch(scan, len(counts), device, first, before, totals, len(counts), ROWS=1, BLOCK=SCAN_BLOCK)
    arguments = (plan.rows, payload, before, totals, indices, faults, len(counts))
    launch(_decode, plan.num_tiles, device, *arguments, BYTES=BYTES)
    return indices


@kept
def _plan_encoder(device: torch.device, counts: tuple[int, ...], numels: tuple[int, ...]) -> Launch:
    layout, sizes, _ = _layout(counts, numels)
    # A code has a bit for every index at least. Where all are there, it has none, and programs only check the indices.
    num_bytes = [max(size, -(-k // 8)) for size, k in zip(sizes, counts, strict=True)]
    return Launch.of(device, tiles_of(num_bytes, BYTES), layout)


@kept
def _plan_decoder(device: torch.device, counts: tuple[int, ...], numels: tuple[int, ...]) -> tuple[Launch, Tensor]:
    """The decoder's launch, and the first tile of each segment with the end of the last."""
    layout, _, high = _layout(counts, numels)
    tiles = tiles_of(high, 8 * BYTES)
    return Launch.of(device, tiles, layout), uploaded(device, starts(tiles))


def _layout(counts: Sequence[int], numels: Sequence[int]) -> tuple[list[Sequence[int]], list[int], list[int]]:
    """The rows of a table after the first, the bytes of each code, and the bits of its high part.

    The rows: count, size, place of the first index, first byte, bits of the high part, bits of an index's low part, whether
    each index sets a bit of its own, bits of the code.
    """
    sizes = [nbytes(k, n) for k, n in zip(counts, numels, strict=True)]
    high, low, step, bits = [], [], [], []
    for count, numel in zip(counts, numels, strict=True):
        width = low_bits(count, numel) if 0 < count < numel else None
        if count in (0, numel):  # nothing is sent; to decode, all bits are ones
            bits.append(0)
            high.append(count)
        else:
            bits.append(numel if width is None else code_bits(count, numel, width))
            high.append(bits[-1] - count * (width or 0))
        low.append(width or 0)
        step.append(int(width is not None))
    return [counts, numels, starts(counts)[:-1], starts(sizes)[:-1], high, low, step, bits], sizes, high


@triton.jit
def _high(indices, i, mask, low, step):
    """The bit that index i sets in the high part."""
    return (tl.load(indices + i, mask=mask, other=0) >> low).to(tl.int64) + i * step


@triton.jit(do_not_specialize=["num_segments", "search_steps"])
def _encode(rows, indices, out, faults, num_segments, search_steps, BYTES: tl.constexpr):
    segment, tile = find_segment(rows, num_segments)
    start = tile * BYTES
    count = tl.load(rows + num_segments + segment)
    numel = tl.load(rows + 2 * num_segments + segment)
    indices += tl.load(rows + 3 * num_segments + segment)
    out += tl.load(rows + 4 * num_segments + segment)
    high_bits = tl.load(rows + 5 * num_segments + segment)
    low = tl.load(rows + 6 * num_segments + segment).to(tl.int32)
    step = tl.load(rows + 7 * num_segments + segment)
    size = tl.load(rows + 8 * num_segments + segment)
    byte = start + tl.arange(0, BYTES)
    position = byte * 8
    packed = tl.zeros([BYTES], tl.int32)

    # The high part: the first index at or after the byte's first bit, and up to seven more.
    first = tl.zeros([BYTES], tl.int64)
    last = tl.where(position < high_bits, count, first)
    for _ in range(search_steps):
        middle = (first + last) // 2
        is_open = first < last
        goes_right = is_open & (_high(indices, middle, is_open, low, step) < position)
        last = tl.where(is_open & ~goes_right, middle, last)
        first = tl.where(goes_right, middle + 1, first)
    for i in tl.static_range(8):
        one = first + i
        mask = (position < high_bits) & (one < count)
        bit = _high(indices, one, mask, low, step) - position
        hits = mask & (bit >= 0) & (bit < 8)
        packed = packed | tl.where(hits, 1 << tl.where(hits, bit, 0).to(tl.int32), 0)

    # The low part: `low` bits of each index.
    width = tl.maximum(low, 1)  # a divisor, also where there is no low part and all is masked
    for i in tl.static_range(8):
        at = position + i - high_bits
        mask = (at >= 0) & (position + i < size)
        item = at // width
        value = tl.load(indices + item, mask=mask, other=0)
        bit = (value >> tl.where(mask, at - item * width, 0).to(tl.int32)) & 1
        packed = packed | (tl.where(mask, bit, 0) << i)
    tl.store(out + byte, packed.to(tl.uint8), mask=position < size)

    # These runs of indices cover all of them: a program has as many as its bytes have bits.
    item = start * 8 + tl.arange(0, 8 * BYTES)
    value = tl.load(indices + item, mask=item < count, other=0)
    before = tl.load(indices + item - 1, mask=(item < count) & (item > 0), other=-1)
    bad = (item < count) & ((value <= before) | (value < 0) | (value >= numel))
    if tl.sum(bad.to(tl.int32)) > 0:
        tl.atomic_add(faults + UNSORTED, 1, sem="relaxed")


@triton.jit
def _ones(payload, position, high_bits, is_sent):
    """The bits of the high part at `position`; all ones where nothing is sent."""
    mask = (position >= 0) & (position < high_bits)
    byte = tl.load(payload + (position >> 3), mask=mask & is_sent, other=0).to(tl.int32)
    return tl.where(mask, tl.where(is_sent, (byte >> (position & 7).to(tl.int32)) & 1, 1), 0)


@triton.jit(do_not_specialize=["num_segments"])
def _count_ones(rows, payload, counts, num_segments, BYTES: tl.constexpr):
    program = tl.program_id(0)
    segment, tile = find_segment(rows, num_segments)
    start = tile * BYTES * 8
    payload += tl.load(rows + 4 * num_segments + segment)
    high_bits = tl.load(rows + 5 * num_segments + segment)
    is_sent = tl.load(rows + 8 * num_segments + segment) > 0
    position = start + tl.arange(0, 8 * BYTES)
    tl.store(counts + program, tl.sum(_ones(payload, position, high_bits, is_sent)))


@triton.jit(do_not_specialize=["num_segments"])
def _decode(rows, payload, before, totals, indices, faults, num_segments, BYTES: tl.constexpr):
    program = tl.program_id(0)
    segment, tile = find_segment(rows, num_segments)
    count = tl.load(rows + num_segments + segment)
    numel = tl.load(rows + 2 * num_segments + segment)
    indices += tl.load(rows + 3 * num_segments + segment)
    payload += tl.load(rows + 4 * num_segments + segment)
    high_bits = tl.load(rows + 5 * num_segments + segment)
    low = tl.load(rows + 6 * num_segments + segment)
    step = tl.load(rows + 7 * num_segments + segment)
    size = tl.load(rows + 8 * num_segments + segment)
    is_sent = size > 0
    position = tile * BYTES * 8 + tl.arange(0, 8 * BYTES)
    ones = _ones(payload, position, high_bits, is_sent)
    rank = tl.load(before + program).to(tl.int64) + tl.cumsum(ones) - ones
    kept = (ones != 0) & (rank < count)
    low_part = load_field(payload, high_bits + rank * low, low, kept)
    index = ((position - rank * step) << low) + low_part
    # An index beyond the segment is a fault, and must not lead later kernels outside.
    tl.store(indices + rank, tl.minimum(index, numel - 1).to(tl.int32), mask=kept)

    # Two indices have the same high part if their ones are neighbours; then the low parts must ascend.
    follows = kept & (step > 0) & (rank > 0) & (_ones(payload, position - 1, high_bits, is_sent) != 0)
    low_before = load_field(payload, high_bits + (rank - 1) * low, low, follows)
    bad = (kept & (index >= numel)) | (follows & (low_part <= low_before))
    num_bad = tl.sum(bad.to(tl.int32)) + (tl.load(totals + segment) != count).to(tl.int32)
    end = tl.load(payload + (size >> 3), mask=(size & 7) != 0, other=0).to(tl.int32) >> (size & 7).to(tl.int32)
    if num_bad + end > 0:
        tl.atomic_add(faults + CORRUPT, 1, sem="relaxed")
