"""Selection of the largest magnitudes in Triton, exact, with ties by lowest index.

Small segments and chunks, up to 4096 elements: one launch. A program holds whole rows and finds each row's threshold bit
by bit. Larger segments are selected by `histograms.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import select as family
from ..checks import numels_of
from . import histograms
from .device import find_segment, load_pointer, magnitude
from .fields import SCAN_BLOCK, scan
from .histograms import TILE, offsets, ranks, tile_of
from .launch import launch, pointers, starts, table, tiles_of

MAX_ROW = 4096  # elements of a row that one program holds
ROW_TILE = 2048  # elements of short rows that one program holds


@family._topk.runs_on("triton")
def topk(xs: list[Tensor], counts: list[int]) -> tuple[Tensor, Tensor]:
    indices, values = _empty_selection(sum(counts), xs)
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
    indices, values = _empty_selection(total, xs)
    kept = [x.numel() // chunk * count + last for x, last in zip(xs, last_counts, strict=True)]
    _select_in_rows(xs, chunk, [count] * len(xs), last_counts, starts(kept)[:-1], indices, values)
    return indices, values


@family._above.runs_on("triton")
def above(xs: list[Tensor], thresholds: list[float]) -> tuple[Tensor, Tensor, list[int]]:
    """Three launches; the host waits for the counts, because they are the sizes of the result."""
    device = xs[0].device if xs else torch.device("cpu")
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
    indices, values = _empty_selection(sum(counts), xs)
    rows = table(device, *layout, starts(counts)[:-1])
    launch(_write_above, first_tile[-1], device, rows, before, indices, values, len(xs), TILE=TILE)
    return indices, values, counts


@family._largest.runs_on("triton")
def largest(xs: list[Tensor]) -> list[float]:
    device = xs[0].device if xs else torch.device("cpu")
    first_tile = starts(tiles_of(numels_of(xs), TILE))
    rows = table(device, first_tile[:-1], pointers(xs), numels_of(xs))
    found = torch.zeros(len(xs), dtype=torch.int32, device=device)
    launch(_largest, first_tile[-1], device, rows, found, len(xs), TILE=TILE)
    values: list[float] = found.view(torch.float32).tolist()
    return values


def _empty_selection(count: int, xs: list[Tensor]) -> tuple[Tensor, Tensor]:
    device = xs[0].device if xs else torch.device("cpu")
    return torch.empty(count, dtype=torch.int32, device=device), torch.empty(count, device=device)


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
    width = max(8, 1 << (chunk - 1).bit_length())
    num_rows = max(1, ROW_TILE // width)
    first_tile = starts(tiles_of(tiles_of(numels_of(xs), chunk), num_rows))
    rows = table(indices.device, first_tile[:-1], pointers(xs), numels_of(xs), counts, last_counts, at)
    arguments = (rows, indices, values, len(xs), chunk)
    launch(_topk_of_rows, first_tile[-1], indices.device, *arguments, WIDTH=width, ROWS=num_rows)


# ---- on the device ----


@triton.jit(do_not_specialize=["num_segments", "chunk"])
def _topk_of_rows(rows, indices, values, num_segments, chunk, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Each row of a tile is a chunk: find its threshold bit by bit, and write the selected elements in order."""
    segment, tile = find_segment(rows, num_segments)
    first_row = tile * ROWS
    numel = tl.load(rows + 2 * num_segments + segment)
    start = (first_row + tl.arange(0, ROWS)) * chunk  # of each row
    size = tl.minimum(tl.maximum(numel - start, 0), chunk).to(tl.int32)
    whole = tl.load(rows + 3 * num_segments + segment).to(tl.int32)
    last = tl.load(rows + 4 * num_segments + segment).to(tl.int32)
    count = tl.where(size == chunk, whole, tl.where(size > 0, last, 0))
    column = tl.arange(0, WIDTH)[None, :]
    inside = column < size[:, None]
    x_ptr = tl.load(rows + num_segments + segment).to(tl.pointer_type(tl.float32))
    x = tl.load(x_ptr + start[:, None] + column, mask=inside, other=0.0)
    # No magnitude is as low as -1, so what lies outside is never kept.
    bits = tl.where(inside, magnitude(x), -1)

    threshold = tl.zeros([ROWS], tl.int32)
    for i in range(31):  # a magnitude has no sign bit
        higher = threshold | (1 << (30 - i))
        reach = tl.sum((bits >= higher[:, None]).to(tl.int32), axis=1)
        threshold = tl.where(reach >= count, higher, threshold)
    larger = (bits > threshold[:, None]).to(tl.int32)
    equal = (bits == threshold[:, None]).to(tl.int32)
    num_ties = (count - tl.sum(larger, axis=1))[:, None]
    kept = larger | (equal & (tl.cumsum(equal, axis=1) - equal < num_ties).to(tl.int32))
    place = tl.cumsum(kept, axis=1) - kept
    # All rows of a segment but the last are whole.
    row_at = tl.load(rows + 5 * num_segments + segment) + (first_row + tl.arange(0, ROWS)) * whole
    place = row_at[:, None] + place
    tl.store(indices + place, (start[:, None] + column).to(tl.int32), mask=kept > 0)
    tl.store(values + place, x, mask=kept > 0)


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
