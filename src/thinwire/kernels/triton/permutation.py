"""Random subsets in Triton: mark the subset, then compact the marks; four launches for all segments.

Each index has one mark, which several programs may set to the same value, so that their order does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...streams import uploaded
from .. import permutation as family
from ..permutation import num_bits
from ..random import keys_on
from .device import find_segment, hash_of
from .fields import SCAN_BLOCK, scan
from .launch import kept, launch, starts, tiles_of

TILE = 1024
MARKS_TILE = 2048


@family._random_indices.runs_on("triton")
def random_indices(keys: list[int] | Tensor, counts: list[int], numels: list[int], device: torch.device) -> Tensor:
    num = len(counts)
    choosing, keeping = _plan(device, tuple(counts), tuple(numels))
    key_table = keys if isinstance(keys, Tensor) else keys_on(keys, device)
    marks = torch.zeros(sum(numels), dtype=torch.uint8, device=device)
    before = torch.empty(keeping.num_tiles, dtype=torch.int32, device=device)
    totals = torch.empty(num, dtype=torch.int32, device=device)
    indices = torch.empty(sum(counts), dtype=torch.int32, device=device)
    launch(_mark, choosing.num_tiles, device, choosing.rows, key_table, marks, num, TILE=TILE)
    launch(_count_marks, keeping.num_tiles, device, keeping.rows, marks, before, num, TILE=MARKS_TILE)
    launch(scan, num, device, keeping.first, before, totals, num, ROWS=1, BLOCK=SCAN_BLOCK)
    launch(_write_marks, keeping.num_tiles, device, keeping.rows, marks, before, indices, num, TILE=MARKS_TILE)
    return indices


@dataclass(frozen=True)
class _Tiles:
    """A table, its number of tiles, and the first tile of each segment with the end of the last."""

    rows: Tensor
    num_tiles: int
    first: Tensor


@kept
def _plan(device: torch.device, counts: tuple[int, ...], numels: tuple[int, ...]) -> tuple[_Tiles, _Tiles]:
    """What marks the chosen elements, and what keeps the marked ones, or the others."""
    excludes = [int(2 * k > n) for k, n in zip(counts, numels, strict=True)]  # then fewer are left out than kept
    chosen = [n - k if left_out else k for k, n, left_out in zip(counts, numels, excludes, strict=True)]
    bits = [num_bits(n) for n in numels]
    rows = [numels, chosen, bits, starts(numels)[:-1], excludes, starts(counts)[:-1]]
    both = []
    for tiles in (tiles_of(chosen, TILE), tiles_of(numels, MARKS_TILE)):
        first_tile = starts(tiles)
        table = uploaded(device, [first_tile[:-1], *rows])
        both.append(_Tiles(table, first_tile[-1], uploaded(device, first_tile)))
    return both[0], both[1]


@triton.jit
def permute(key, numbers, bits):
    """A Feistel network over numbers (uint32) of `bits` bits; `kernels.permutation._permute`."""
    low_bits = bits // 2
    high = numbers >> low_bits
    one = tl.full([], 1, tl.uint32)
    low = numbers & ((one << low_bits) - 1)
    for i in tl.static_range(3):
        high = high ^ (hash_of(key, low | (2 * i << 16)) >> (32 - (bits - low_bits)))
        low = low ^ (hash_of(key, high | ((2 * i + 1) << 16)) >> (32 - low_bits))
    return (high << low_bits) | low


@triton.jit(do_not_specialize=["num_segments"])
def _mark(rows, key_table, marks, num_segments, TILE: tl.constexpr):
    """Follow 0, 1, ... through the permutation until they fall inside the segment."""
    segment, tile = find_segment(rows, num_segments)
    start = tile * TILE
    numel = tl.load(rows + num_segments + segment).to(tl.uint32)
    count = tl.load(rows + 2 * num_segments + segment)
    bits = tl.load(rows + 3 * num_segments + segment).to(tl.uint32)
    key = tl.load(key_table + segment)
    item = start + tl.arange(0, TILE)
    mask = item < count
    numbers = permute(key, item.to(tl.uint32), bits)
    # All numbers of a tile wait for its last; those inside stay as they are.
    while tl.max((mask & (numbers >= numel)).to(tl.int32)) > 0:
        numbers = tl.where(mask & (numbers >= numel), permute(key, numbers, bits), numbers)
    tl.store(marks + tl.load(rows + 4 * num_segments + segment) + numbers, tl.full([TILE], 1, tl.uint8), mask=mask)


@triton.jit
def _kept(rows, marks, num_segments, TILE: tl.constexpr):
    """The segment of this program's marks, where it starts there, and 1 for each index that is kept."""
    segment, tile = find_segment(rows, num_segments)
    start = tile * TILE
    position = start + tl.arange(0, TILE)
    inside = position < tl.load(rows + num_segments + segment)
    mark = tl.load(marks + tl.load(rows + 4 * num_segments + segment) + position, mask=inside, other=0).to(tl.int32)
    left_out = tl.load(rows + 5 * num_segments + segment).to(tl.int32)
    return segment, start, tl.where(inside, mark ^ left_out, 0)


@triton.jit(do_not_specialize=["num_segments"])
def _count_marks(rows, marks, counts, num_segments, TILE: tl.constexpr):
    program = tl.program_id(0)
    _, _, kept = _kept(rows, marks, num_segments, TILE)
    tl.store(counts + program, tl.sum(kept))


@triton.jit(do_not_specialize=["num_segments"])
def _write_marks(rows, marks, before, indices, num_segments, TILE: tl.constexpr):
    program = tl.program_id(0)
    segment, start, kept = _kept(rows, marks, num_segments, TILE)
    first = tl.load(rows + 6 * num_segments + segment) + tl.load(before + program)
    place = first + tl.cumsum(kept) - kept
    tl.store(indices + place, (start + tl.arange(0, TILE)).to(tl.int32), mask=kept > 0)
