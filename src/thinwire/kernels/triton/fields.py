"""Bit fields and sums of counts on the device, shared by the kernels that select and code indices."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_field(payload, position, width, mask):
    """The `width` (0 to 31) bits from bit `position` (int64) on of a payload, the lowest first, as int32; 0 if masked."""
    byte = position >> 3
    shift = position & 7
    bits = tl.zeros(position.shape, tl.int64)
    # 31 bits that begin at any bit of a byte lie in five bytes at most.
    for i in tl.static_range(5):
        needed = mask & (8 * i < shift + width) & (width > 0)
        bits = bits | (tl.load(payload + byte + i, mask=needed, other=0).to(tl.int64) << (8 * i))
    one = tl.full([], 1, tl.int64)
    return ((bits >> shift) & ((one << width) - 1)).to(tl.int32)


@triton.jit(do_not_specialize=["num_segments"])
def scan(first_tile, counts, totals, num_segments, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Replace each tile's counts by the counts of all tiles before it in its segment; write each segment's totals.

    Args:
        first_tile: num_segments + 1 numbers (int64).
        counts: ROWS kinds of counts (int32), each for all tiles; changed.
        totals: (ROWS, num_segments) of int32.

    One program serves a segment and walks over its tiles.
    """
    segment = tl.program_id(0)
    first = tl.load(first_tile + segment)
    last = tl.load(first_tile + segment + 1)
    row = tl.arange(0, ROWS)
    before = tl.zeros([ROWS], tl.int32)
    for start in range(first, last, BLOCK):
        tile = start + tl.arange(0, BLOCK)[None, :]
        at = counts + row[:, None] * tl.load(first_tile + num_segments) + tile
        count = tl.load(at, mask=tile < last, other=0)
        tl.store(at, before[:, None] + tl.cumsum(count, axis=1) - count, mask=tile < last)
        before += tl.sum(count, axis=1)
    tl.store(totals + row * num_segments + segment, before)


SCAN_BLOCK = 1024
