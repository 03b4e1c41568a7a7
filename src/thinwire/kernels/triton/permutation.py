"""Random subsets in Triton: mark the subset, then compact the marks; four launches for all segments.

A mark is a bit of a 32-bit word. Programs set bits with atomics, whose order does not matter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...streams import uploaded
from .. import permutation as family
from ..permutation import num_bits
from ..random import keys_on
from .device import find_segment
from .fields import SCAN_BLOCK, scan
from .launch import Launch, kept, launch, starts, tiles_of

LANES = tl.constexpr(128)  # one for each thread
ITEMS = 16  # that a thread permutes
TILE = ITEMS * LANES.value
WORDS = 512  # of marks that a program reads
MARKS_TILE = 32 * WORDS


@family._random_indices.runs_on("triton")
def random_indices(keys: list[int] | Tensor, counts: list[int], numels: list[int], device: torch.device) -> Tensor:
    num = len(counts)
    choosing, keeping, first = _plan(device, tuple(counts), tuple(numels))
    key_table = keys if isinstance(keys, Tensor) else keys_on(keys, device)
    marks = torch.zeros(sum(tiles_of(numels, 32)), dtype=torch.int32, device=device)
    before = torch.empty(keeping.num_tiles, dtype=torch.int32, device=device)
    totals = torch.empty(num, dtype=torch.int32, device=device)
    indices = torch.empty(sum(counts), dtype=torch.int32, device=device)
    launch(_mark, choosing.num_tiles, device, choosing.rows, key_table, marks, num, ITEMS=ITEMS)
    launch(_count_marks, keeping.num_tiles, device, keeping.rows, marks, before, num, WORDS=WORDS)
    launch(scan, num, device, first, before, totals, num, ROWS=1, BLOCK=SCAN_BLOCK)
    launch(_write_marks, keeping.num_tiles, device, keeping.rows, marks, before, indices, num, WORDS=WORDS)
    return indices


@kept
def _plan(device: torch.device, counts: tuple[int, ...], numels: tuple[int, ...]) -> tuple[Launch, Launch, Tensor]:
    """What marks the chosen elements, what keeps the marked ones, or the others, and the first tiles of the latter."""
    excludes = [int(2 * k > n) for k, n in zip(counts, numels, strict=True)]  # then fewer are left out than kept
    chosen = [n - k if left_out else k for k, n, left_out in zip(counts, numels, excludes, strict=True)]
    bits = [num_bits(n) for n in numels]
    rows = [numels, chosen, bits, starts(tiles_of(numels, 32))[:-1], excludes, starts(counts)[:-1]]
    tiles = tiles_of(numels, MARKS_TILE)
    marking, keeping = Launch.of(device, tiles_of(chosen, TILE), rows), Launch.of(device, tiles, rows)
    return marking, keeping, uploaded(device, starts(tiles))


@triton.jit
def permute(key, numbers, bits):
    """A Feistel network over numbers (uint32) of `bits` bits; `kernels.permutation._permute`."""
    low_bits = bits // 2
    high = numbers >> low_bits
    one = tl.full([], 1, tl.uint32)
    low = numbers & ((one << low_bits) - 1)
    for i in tl.static_range(3):
        high = high ^ (_hash(key, low, 2 * i) >> (32 - (bits - low_bits)))
        low = low ^ (_hash(key, high, 2 * i + 1) >> (32 - low_bits))
    return (high << low_bits) | low


@triton.jit
def _hash(key, half, ROUND: tl.constexpr):
    """The highest 16 bits of `hash_of(key, half | ROUND << 16)`, and lower ones of no use, for a half of 16 bits at most.

    The round is added to the key, which all threads share. The last step of `hash_of` changes only lower bits.
    """
    factor = tl.full([], 0x9E3779B9, tl.uint32)
    h = half * factor + (key.to(tl.uint32) + factor * (ROUND << 16))
    h = (h ^ (h >> 16)) * tl.full([], 0x7FEB352D, tl.uint32)
    h = h ^ (h >> 15) ^ (key >> 32).to(tl.uint32)
    return h * tl.full([], 0x846CA68B, tl.uint32)


@triton.jit(do_not_specialize=["num_segments"])
def _mark(rows, key_table, marks, num_segments, ITEMS: tl.constexpr):
    """Follow 0, 1, ... through the permutation until they fall inside the segment."""
    segment, tile = find_segment(rows, num_segments)
    numel = tl.load(rows + num_segments + segment).to(tl.uint32)
    count = tl.load(rows + 2 * num_segments + segment).to(tl.int32)
    bits = tl.load(rows + 3 * num_segments + segment).to(tl.uint32)
    key = tl.load(key_table + segment)
    item = (tile * (ITEMS * LANES)).to(tl.int32) + tl.arange(0, ITEMS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    mask = item < count
    numbers = tl.where(mask, permute(key, item.to(tl.uint32), bits), 0)
    # Few fall outside. Each thread follows one of its own at a time, the largest; no other of its numbers is equal.
    largest = tl.max(numbers, axis=0)
    while tl.max(largest, axis=0) >= numel:
        following = tl.where(largest >= numel, permute(key, largest, bits), largest)
        numbers = tl.where(numbers == largest[None, :], following[None, :], numbers)
        largest = tl.max(numbers, axis=0)
    words = marks + tl.load(rows + 4 * num_segments + segment)
    bit = (tl.full([], 1, tl.uint32) << (numbers & 31)).to(tl.int32, bitcast=True)
    tl.atomic_or(words + (numbers >> 5).to(tl.int32), bit, mask=mask, sem="relaxed")


@triton.jit
def _kept(rows, marks, num_segments, WORDS: tl.constexpr):
    """The segment of this program's marks, the first index of each word, and its bits of indices that are kept."""
    segment, tile = find_segment(rows, num_segments)
    numel = tl.load(rows + num_segments + segment).to(tl.int32)
    word = (tile * WORDS).to(tl.int32) + tl.arange(0, WORDS)
    # `numel` rounded up might exceed an int32.
    mask = word <= (numel - 1) >> 5
    marked = tl.load(marks + tl.load(rows + 4 * num_segments + segment) + word, mask=mask, other=0)
    if tl.load(rows + 5 * num_segments + segment) > 0:  # those without a mark are kept
        inside = tl.where(word < numel >> 5, -1, (1 << (numel & 31)) - 1)
        marked = tl.where(mask, ~marked & inside, 0)
    return segment, word * 32, marked


@triton.jit
def _num_ones(words):
    """How many bits of an int32 are 1."""
    n = words.to(tl.uint32, bitcast=True)
    n = n - ((n >> 1) & 0x55555555)
    n = (n & 0x33333333) + ((n >> 2) & 0x33333333)
    n = (n + (n >> 4)) & 0x0F0F0F0F
    return (n * 0x01010101 >> 24).to(tl.int32)


@triton.jit(do_not_specialize=["num_segments"])
def _count_marks(rows, marks, counts, num_segments, WORDS: tl.constexpr):
    program = tl.program_id(0)
    _, _, marked = _kept(rows, marks, num_segments, WORDS)
    tl.store(counts + program, tl.sum(_num_ones(marked)))


@triton.jit(do_not_specialize=["num_segments"])
def _write_marks(rows, marks, before, indices, num_segments, WORDS: tl.constexpr):
    """Each word writes its lowest index, and then its next ones."""
    program = tl.program_id(0)
    segment, index, marked = _kept(rows, marks, num_segments, WORDS)
    indices += tl.load(rows + 6 * num_segments + segment) + tl.load(before + program)
    count = _num_ones(marked)
    place = tl.cumsum(count) - count
    for _ in range(tl.max(count)):
        lowest = marked & -marked
        # A power of two as a float32 has its logarithm in the bits of the exponent.
        exponent = lowest.to(tl.uint32, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True) >> 23
        tl.store(indices + place, index + (exponent - 127), mask=marked != 0)
        marked = marked ^ lowest
        place += 1
