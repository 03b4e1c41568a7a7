"""Selection of the largest magnitudes in Triton, exact, with ties by lowest index.

Small segments and chunks, up to 4096 elements: one launch. A program holds whole rows and searches each row's threshold.
Larger segments are selected by `histograms.py`.
"""

from __future__ import annotations

from math import gcd, pi, sqrt
from statistics import NormalDist
from struct import pack, unpack

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import select as family
from ..checks import device_of, numels_of
from . import histograms
from .device import find_segment, load_pointer, load_size, magnitude
from .fields import SCAN_BLOCK, scan
from .histograms import TILE, offsets, ranks, tile_of
from .launch import Launch, kept, launch, launch_each, plan_launches, pointers, starts, table, tiles_of

MAX_ROW = 4096  # elements of a row that one program holds
ROW_TILE = 2048  # elements of short rows that one program holds


@family._topk.runs_on("triton")
def topk(xs: list[Tensor], counts: list[int]) -> tuple[Tensor, Tensor]:
    indices, values = empty_selection(sum(counts), xs)
    at = starts(counts)[:-1]
    small = [i for i, x in enumerate(xs) if x.numel() <= MAX_ROW and counts[i]]
    large = [i for i, x in enumerate(xs) if x.numel() > MAX_ROW and counts[i]]
    if small:
        kept = [counts[i] for i in small]
        chosen = [xs[i] for i in small]
        chunk = max(x.numel() for x in chosen)
        _select_in_rows(chosen, chunk, kept, kept, [at[i] for i in small], indices, values)
    if large:
        chosen, kept = [xs[i] for i in large], [counts[i] for i in large]
        histograms.select(chosen, kept, [at[i] for i in large], indices, values)
    return indices, values


@family._topk_in_chunks.runs_on("triton")
def topk_in_chunks(
    xs: list[Tensor], chunk: int, count: int, last_counts: list[int], total: int
) -> tuple[Tensor, Tensor]:
    if chunk > MAX_ROW:
        return family._topk_in_chunks.reference(xs, chunk, count, last_counts, total)
    indices, values = empty_selection(total, xs)
    kept = [x.numel() // chunk * count + last for x, last in zip(xs, last_counts, strict=True)]
    _select_in_rows(xs, chunk, [count] * len(xs), last_counts, starts(kept)[:-1], indices, values)
    return indices, values


@family._above.runs_on("triton")
def above(xs: list[Tensor], thresholds: list[float]) -> tuple[Tensor, Tensor, list[int]]:
    """Three launches; the host waits for the counts, because they are the sizes of the result."""
    device = device_of(xs)
    first_tile = starts(tiles_of(numels_of(xs), TILE))
    # As bits, like the magnitudes that the kernel compares them with.
    bits = torch.tensor(thresholds, dtype=torch.float32, device="cpu").view(torch.int32).tolist()
    layout = [first_tile[:-1], pointers(xs), numels_of(xs), bits]
    before = torch.empty(first_tile[-1], dtype=torch.int32, device=device)
    totals = torch.empty(len(xs), dtype=torch.int32, device=device)
    rows = table(device, *layout)
    launch(_count_above, first_tile[-1], device, rows, before, len(xs), TILE=TILE)
    launch(scan, len(xs), device, table(device, first_tile), before, totals, len(xs), ROWS=1, BLOCK=SCAN_BLOCK)
    counts: list[int] = totals.tolist()
    indices, values = empty_selection(sum(counts), xs)
    rows = table(device, *layout, starts(counts)[:-1])
    launch(_write_above, first_tile[-1], device, rows, before, indices, values, len(xs), TILE=TILE)
    return indices, values, counts


@family._largest.runs_on("triton")
def largest(xs: list[Tensor]) -> list[float]:
    device = device_of(xs)
    first_tile = starts(tiles_of(numels_of(xs), TILE))
    rows = table(device, first_tile[:-1], pointers(xs), numels_of(xs))
    found = torch.zeros(len(xs), dtype=torch.int32, device=device)
    launch(_largest, first_tile[-1], device, rows, found, len(xs), TILE=TILE)
    values: list[float] = found.view(torch.float32).tolist()
    return values


def empty_selection(count: int, xs: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Buffers for the indices and the values of `count` elements of segments."""
    device = device_of(xs)
    return torch.empty(count, dtype=torch.int32, device=device), torch.empty(count, dtype=torch.float32, device=device)


def _select_in_rows(
    xs: list[Tensor],
    chunk: int,
    counts: list[int],
    last_counts: list[int],
    at: list[int],
    indices: Tensor,
    values: Tensor,
) -> None:
    """Select `counts[i]` of each whole chunk of segment i, and `last_counts[i]` of the shorter last one."""
    launches, width, num_rows = _plan(
        indices.device, chunk, tuple(counts), tuple(last_counts), tuple(at), tuple(numels_of(xs)), pointers(xs)
    )
    arguments = (indices, values, len(xs), chunk)
    launch_each(_topk_of_rows, launches, indices.device, *arguments, WIDTH=width, ROWS=num_rows)


@kept
def _plan(
    device: torch.device,
    chunk: int,
    counts: tuple[int, ...],
    last_counts: tuple[int, ...],
    at: tuple[int, ...],
    numels: tuple[int, ...],
    addresses: tuple[int, ...],
) -> tuple[list[Launch], int, int]:
    """The launches, the width of a row, and the rows of a tile."""
    width = max(8, 1 << (chunk - 1).bit_length())
    num_rows = max(1, ROW_TILE // width)
    factors = [_factor(count, chunk) for count in counts]
    last_factors = [_factor(count, numel % chunk) for count, numel in zip(last_counts, numels, strict=True)]
    rows = [addresses, numels, counts, last_counts, at, factors, last_factors]
    num_tiles = tiles_of(tiles_of(numels, chunk), num_rows)
    # What divides a segment's size and the chunk divides where each row begins and ends.
    divisors = [gcd(numel, chunk) for numel in numels]
    return plan_launches(device, rows, num_tiles, divisors, addresses), width, num_rows


def _factor(count: int, numel: int) -> int:
    """The bits of a float32: about how often a row's threshold contains the sum of its magnitudes.

    For a normal distribution: its quantile over the mean magnitude, divided by the size. Others take some passes more.
    """
    if not 0 < count < numel:
        return 0
    factor = NormalDist().inv_cdf(1 - count / numel / 2) / sqrt(2 / pi) / numel
    bits: int = unpack("i", pack("f", factor))[0]
    return bits


# ---- on the device ----


@triton.jit(do_not_specialize=["num_segments", "chunk"])
def _topk_of_rows(
    rows, indices, values, num_segments, chunk, VECTOR: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr
):
    """Each row of a tile is a chunk: find its threshold, and write the selected elements in order."""
    segment, tile = find_segment(rows, num_segments)
    first_row = tile * ROWS
    first = first_row * chunk
    row = tl.arange(0, ROWS)
    start = row * chunk  # of each row, relative to the tile
    if VECTOR > 1:
        first = tl.multiple_of(first, 4)
        start = tl.multiple_of(start, 4)
    left = load_size(rows + 2 * num_segments + segment, VECTOR) - first
    size = tl.minimum(tl.maximum(tl.minimum(left, ROWS * WIDTH).to(tl.int32) - start, 0), chunk)
    if VECTOR > 1:
        size = tl.multiple_of(size, 4)
    column = tl.arange(0, WIDTH)[None, :]
    x_ptr = load_pointer(rows + num_segments + segment, VECTOR) + first
    x = tl.load(x_ptr + (start[:, None] + column), mask=column < size[:, None], other=0.0)
    # Of the last row; none is kept of rows after it.
    whole = tl.load(rows + 3 * num_segments + segment).to(tl.int32)
    last = tl.load(rows + 4 * num_segments + segment).to(tl.int32)
    count = tl.where(size == chunk, whole, tl.where(size > 0, last, 0))
    factor = tl.load(rows + tl.where(size == chunk, 6, 7) * num_segments + segment).to(tl.int32)
    bits, threshold = _selected(x, count, factor.to(tl.float32, bitcast=True), WIDTH)

    # All rows of a segment but the last are whole. A kept element counts itself, so its place is one less.
    at = tl.load(rows + 5 * num_segments + segment) + first_row * whole - 1
    kept = bits >= threshold[:, None]
    place = (row * whole)[:, None] + tl.cumsum(kept.to(tl.int32), axis=1)
    if VECTOR > 1:
        # A thread has four elements next to each other. It stores one of them at a time, without an exchange with others.
        parts = (_quarters(place, ROWS, WIDTH), _quarters(x, ROWS, WIDTH), _quarters(bits, ROWS, WIDTH))
        for i in tl.static_range(4):
            index = first.to(tl.int32) + (start[:, None] + (4 * tl.arange(0, WIDTH // 4) + i)[None, :])
            _store(indices + at, values + at, parts[0][i], index, parts[1][i], parts[2][i] >= threshold[:, None])
    else:
        _store(indices + at, values + at, place, first.to(tl.int32) + (start[:, None] + column), x, kept)


@triton.jit
def _store(indices, values, place, index, x, kept):
    tl.store(indices + place, index, mask=kept)
    tl.store(values + place, x, mask=kept)


@triton.jit
def _quarters(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Of each four columns next to each other the first, the second, the third and the fourth; (ROWS, WIDTH // 4) each."""
    even, odd = tl.split(tl.reshape(x, (ROWS, WIDTH // 4, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _log2(numbers):
    """Nearly the logarithm of positive numbers (int32), as int32 in units of 2^-23: linear between powers of two."""
    return numbers.to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def _selected(x, count, factor, WIDTH: tl.constexpr):
    """The bits of magnitudes, and for each row a threshold that those of the `count` selected elements reach.

    The bits of ties that are not selected are -1. Where a row ends before `WIDTH`, zeros follow, which lose all ties.

    The threshold lies above `low` and not above `high`: at least `count` elements are above `low`, and fewer above `high`.
    Each pass counts the elements above a candidate between them. If `count` are, the search ends: any threshold that
    selects as many selects the same. If elements tie, it ends where `high` follows `low`.

    The first candidate is a factor times the sum of magnitudes, see `_factor`. The next lie where a line between the
    logarithms of both numbers of elements crosses that of `count`; an end that stays twice gets half the weight ("Illinois",
    a variant of regula falsi). After 16 passes the interval is halved, so there are 48 passes at most. Candidates decide
    how long the search takes, not what it finds, so it does not matter how they are rounded.
    """
    bits = magnitude(x)
    low = tl.full(count.shape, -1, tl.int32)
    high = tl.max(bits, axis=1)
    surplus = WIDTH - count  # how many more than `count` are above `low`
    wanted = _log2(2 * count + 1)  # of twice as many and one, because there may be none
    low_log = _log2(tl.full(count.shape, 2 * WIDTH + 1, tl.int32)) - wanted
    high_log = _log2(tl.full(count.shape, 1, tl.int32)) - wanted
    candidate = (tl.sum(tl.abs(x), axis=1) * factor).to(tl.int32, bitcast=True)
    moved = tl.zeros(count.shape, tl.int32)  # 1 after `low` has moved, -1 after `high` has
    num_passes = 0
    # A difference that exceeds an int32 wraps around, and is not 1.
    while tl.max((high - low != 1).to(tl.int32), axis=0) > 0:
        candidate = tl.minimum(tl.maximum(candidate, low + 1), high - 1)
        # The sign of a difference: fewer instructions than a comparison whose result is added up.
        signs = (candidate[:, None] - bits).to(tl.uint32, bitcast=True) >> 31
        above = tl.sum(signs.to(tl.int32, bitcast=True), axis=1)
        log = _log2(2 * above + 1) - wanted
        is_low = above >= count
        low_log = tl.where(is_low, log, tl.where(moved < 0, low_log >> 1, low_log))
        high_log = tl.where(is_low, tl.where(moved > 0, high_log >> 1, high_log), log)
        moved = tl.where(is_low, 1, -1)
        surplus = tl.where(is_low, above - count, surplus)
        low = tl.where(is_low, candidate, low)
        high = tl.where(is_low, tl.where(above == count, candidate + 1, high), candidate)
        num_passes += 1
        part = low_log.to(tl.float32) * _inverse((low_log - high_log).to(tl.float32))
        width = (high - low).to(tl.uint32, bitcast=True).to(tl.float32)
        candidate = low + (width * tl.where(num_passes < 16, part, 0.5)).to(tl.int32)

    if tl.max(surplus, axis=0) > 0:  # of the elements equal to the threshold, the last are too many
        equal = (bits == high[:, None]).to(tl.int32)
        num_ties = tl.sum(equal, axis=1) - surplus
        bits = tl.where((equal > 0) & (tl.cumsum(equal, axis=1) > num_ties[:, None]), -1, bits)
    return bits, high


@triton.jit
def _inverse(x):
    """Nearly 1 / x of a positive number, and not more: an estimate from its bits, and a step of Newton's method."""
    inverse = (0x7EF311C7 - x.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    return inverse * (2.0 - x * inverse)


@triton.jit
def _read_tile(rows, num_segments, TILE: tl.constexpr):
    """This program's segment, where its tile starts there, its elements, and which of them exist."""
    # `VECTOR` is 1, because these tables have segments of any alignment.
    segment, start, left = tile_of(rows, num_segments, 1, TILE)
    offset = offsets(TILE)
    x = tl.load(load_pointer(rows + num_segments + segment, 1) + start + offset, mask=offset < left, other=0.0)
    return segment, start, x, offset < left


@triton.jit(do_not_specialize=["num_segments"])
def _count_above(rows, counts, num_segments, TILE: tl.constexpr):
    segment, start, x, inside = _read_tile(rows, num_segments, TILE)
    threshold = tl.load(rows + 3 * num_segments + segment).to(tl.int32)
    tl.store(counts + tl.program_id(0), tl.sum((inside & (magnitude(x) >= threshold)).to(tl.int32)))


@triton.jit(do_not_specialize=["num_segments"])
def _write_above(rows, before, indices, values, num_segments, TILE: tl.constexpr):
    segment, start, x, inside = _read_tile(rows, num_segments, TILE)
    is_kept = inside & (magnitude(x) >= tl.load(rows + 3 * num_segments + segment).to(tl.int32))
    rank, _ = ranks(is_kept.to(tl.int32))
    at = tl.load(rows + 4 * num_segments + segment) + tl.load(before + tl.program_id(0))
    tl.store(indices + at + rank, start.to(tl.int32) + offsets(TILE), mask=is_kept)
    tl.store(values + at + rank, x, mask=is_kept)


@triton.jit(do_not_specialize=["num_segments"])
def _largest(rows, found, num_segments, TILE: tl.constexpr):
    segment, start, x, inside = _read_tile(rows, num_segments, TILE)
    tl.atomic_max(found + segment, tl.max(tl.where(inside, magnitude(x), 0)), sem="relaxed")
