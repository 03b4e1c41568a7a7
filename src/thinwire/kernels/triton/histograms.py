"""Top-k of large segments in Triton, exact, with ties by lowest index.

The threshold is the count-th largest magnitude. Four histograms of the magnitudes' bits (7, 8, 8 and 8 of 31) each give one
of its digits. Then one launch counts what each tile keeps, one adds the counts up, and one writes. That is eleven launches
for all segments of a bucket; six of them read every element. Counting costs a vote of the threads for each bit of a digit,
and a population count for each 32 bins. So four passes over 256 bins take a fifth of the instructions of three over 2048.

Atomics add to integer histograms only, so that their order does not matter. The first launch may make the segments, by
momentum correction or error feedback.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...streams import uploaded
from ..checks import numels_of
from .device import find_segment, load_pointer, load_size, magnitude
from .fields import SCAN_BLOCK, scan
from .launch import Launch, kept, launch, launch_each, plan_launches, pointers, starts, table, tiles_of

TILE = 2048
STEPS = 4  # tiles that a program of a histogram counts, before it adds to the segment's
BINS = tl.constexpr(256)
PASSES = 4


@dataclass(frozen=True)
class _Plan:
    """The launches of a selection.

    Args:
        counting: of histograms.
        choosing: of tiles; its table has one more row: the number of each segment's first tile, over all launches.
        first: the first tile of each segment, with the end of the last.
        num_tiles: of all launches.
    """

    counting: list[Launch]
    choosing: list[Launch]
    first: Tensor
    num_tiles: int


@kept
def _plan(
    device: torch.device,
    numels: tuple[int, ...],
    counts: tuple[int, ...],
    at: tuple[int, ...],
    *addresses: tuple[int, ...],
) -> _Plan:
    rows, tiles = [addresses[0], numels, counts, at], tiles_of(numels, TILE)
    first = starts(tiles)
    counting = plan_launches(device, rows, tiles_of(numels, STEPS * TILE), numels, *addresses)
    choosing = plan_launches(device, [*rows, first[:-1]], tiles, numels, *addresses)
    return _Plan(counting, choosing, uploaded(device, first), first[-1])


def select(
    xs: Sequence[Tensor],
    counts: list[int],
    at: list[int],
    indices: Tensor,
    values: Tensor,
    sources: Sequence[tuple[int, ...]] = (),
    m: float = 0.0,
    factor: float = 0.0,
    source: str = "none",
) -> None:
    """Top-k of segments by histograms; the first launch may make the segments, see `momentum.py`.

    Args:
        xs: segments that the later launches read.
        counts: how many of each, above 0.
        at: where each segment's selection begins.
        indices: int32, written from `at` on.
        values: float32, written from `at` on.
        sources: addresses of what the first launch makes the segments from: a tuple per kind of buffer.
        m: of momentum.
        factor: of the gradients.
        source: "none", or how the first launch makes the segments: see `source`.
    """
    device, num = xs[0].device, len(xs)
    plan = _plan(device, tuple(numels_of(xs)), tuple(counts), tuple(at), pointers(xs), *sources)
    others = table(device, *sources) if sources else None
    hist = torch.zeros(PASSES * num * BINS.value, dtype=torch.int32, device=device)  # by pass, then by segment
    chosen = torch.empty(2 * num, dtype=torch.int32, device=device)  # the threshold's digits so far; how many of it
    before = torch.empty(2 * plan.num_tiles, dtype=torch.int32, device=device)
    totals = torch.empty(2 * num, dtype=torch.int32, device=device)
    for i in range(PASSES):
        kind, buffers = (source, others) if i == 0 else ("none", None)
        arguments = (buffers, hist, chosen, num, m, factor)
        launch_each(_histogram, plan.counting, device, *arguments, PASS=i, SOURCE=kind, STEPS=STEPS, TILE=TILE)
        # Any launch's table serves: they differ in the row of first tiles, which this kernel does not read.
        launch(_choose_digit, num, device, plan.counting[0].rows, hist, chosen, num, PASS=i)
    launch_each(_count_kept, plan.choosing, device, chosen, before, num, plan.num_tiles, TILE=TILE)
    launch(scan, num, device, plan.first, before, totals, num, ROWS=2, BLOCK=SCAN_BLOCK)
    kept_ones = (chosen, before, indices, values, num, plan.num_tiles)
    launch_each(_write_kept, plan.choosing, device, *kept_ones, TILE=TILE)


# ---- on the device ----


@triton.jit
def tile_of(rows, num_segments, VECTOR: tl.constexpr, TILE: tl.constexpr):
    """This program's segment, where its tile starts, and how many elements follow; rows 1 and 2 are addresses and sizes."""
    segment, tile = find_segment(rows, num_segments)
    start = tile * TILE
    return segment, start, load_size(rows + 2 * num_segments + segment, VECTOR) - start


@triton.jit
def load_tile(rows, num_segments, segment, start, left, VECTOR: tl.constexpr, TILE: tl.constexpr):
    """The elements of a tile, and which of them exist."""
    offset = tl.arange(0, TILE)
    x = load_pointer(rows + num_segments + segment, VECTOR) + start
    return tl.load(x + offset, mask=offset < left, other=0.0), offset < left


@triton.jit
def read_tile(rows, num_segments, VECTOR: tl.constexpr, TILE: tl.constexpr):
    """This program's segment, where its tile starts there, its elements, and which of them exist."""
    segment, start, left = tile_of(rows, num_segments, VECTOR, TILE)
    x, inside = load_tile(rows, num_segments, segment, start, left, VECTOR, TILE)
    return segment, start, x, inside


@triton.jit
def write_selected(indices, values, place, start, x, kept, TILE: tl.constexpr):
    """Write the selected elements of a tile, each at its place."""
    tl.store(indices + place, (start + tl.arange(0, TILE)).to(tl.int32), mask=kept)
    tl.store(values + place, x, mask=kept)


@triton.jit(do_not_specialize=["num_segments"])
def _choose_digit(rows, hist, chosen, num_segments, PASS: tl.constexpr):
    """Append the next digit to a segment's threshold: the largest digit that the wanted number of elements reach."""
    segment = tl.program_id(0)
    bins = tl.arange(0, BINS)
    numbers = tl.load(hist + (PASS * num_segments + segment) * BINS + bins)
    if PASS == 0:
        prefix = tl.zeros([], tl.int32)
        count = tl.load(rows + 3 * num_segments + segment).to(tl.int32)
    else:
        prefix = tl.load(chosen + segment) << 8
        count = tl.load(chosen + num_segments + segment)
    reach = tl.sum(numbers) - tl.cumsum(numbers) + numbers  # how many have this digit or a larger one
    digit = tl.max(tl.where(reach >= count, bins, 0))
    larger = tl.sum(tl.where(bins > digit, numbers, 0))
    tl.store(chosen + segment, prefix | digit)
    tl.store(chosen + num_segments + segment, count - larger)


@triton.jit
def source(
    others,
    segment,
    num_segments,
    start,
    left,
    m,
    factor,
    out,
    SOURCE: tl.constexpr,
    VECTOR: tl.constexpr,
    TILE: tl.constexpr,
):
    """Make the elements of a tile from gradients, write them to `out`, and return them; rounded as the reference does."""
    offset = tl.arange(0, TILE)
    mask = offset < left
    g = tl.load(load_pointer(others + segment, VECTOR) + start + offset, mask=mask, other=0.0) * factor
    held = tl.load(load_pointer(others + num_segments + segment, VECTOR) + start + offset, mask=mask, other=0.0)
    if SOURCE == "feedback":
        x = held + g
    else:
        v = tl.load(load_pointer(others + 2 * num_segments + segment, VECTOR) + start + offset, mask=mask, other=0.0)
        if SOURCE == "nesterov":
            u = (held + g) * m
            x = v + (u + g)
        else:
            u = held * m + g
            x = v + u
        tl.store(load_pointer(others + 3 * num_segments + segment, VECTOR) + start + offset, u, mask=mask)
    tl.store(out + start + offset, x, mask=mask)
    return x


@triton.jit(do_not_specialize=["num_segments"])
def _histogram(
    rows,
    others,
    hist,
    chosen,
    num_segments,
    m,
    factor,
    PASS: tl.constexpr,
    SOURCE: tl.constexpr,
    VECTOR: tl.constexpr,
    STEPS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Count the next digit of the magnitudes that begin with the threshold's digits so far."""
    segment, first, length = tile_of(rows, num_segments, VECTOR, STEPS * TILE)
    SHIFT: tl.constexpr = 24 - 8 * PASS
    if PASS > 0:
        prefix = tl.load(chosen + segment)
    numbers = tl.zeros([BINS], tl.int32)
    for i in range(STEPS):
        start, left = first + i * TILE, length - i * TILE
        if SOURCE == "none":
            x, inside = load_tile(rows, num_segments, segment, start, left, VECTOR, TILE)
        else:
            out = load_pointer(rows + num_segments + segment, VECTOR)
            x = source(others, segment, num_segments, start, left, m, factor, out, SOURCE, VECTOR, TILE)
            inside = tl.arange(0, TILE) < left
        digits = magnitude(x) >> SHIFT
        if PASS > 0:
            inside = inside & ((digits >> 8) == prefix)
        numbers += tl.histogram(digits & 255, BINS, mask=inside)
    bins = tl.arange(0, BINS)
    tl.atomic_add(hist + (PASS * num_segments + segment) * BINS + bins, numbers, mask=numbers > 0, sem="relaxed")


@triton.jit
def _read_numbered(rows, num_segments, VECTOR: tl.constexpr, TILE: tl.constexpr):
    """As `read_tile`, with the tile's number among those of all launches."""
    segment, start, x, inside = read_tile(rows, num_segments, VECTOR, TILE)
    return segment, start, x, inside, tl.load(rows + 5 * num_segments + segment) + start // TILE


@triton.jit(do_not_specialize=["num_segments", "num_tiles"])
def _count_kept(rows, chosen, before, num_segments, num_tiles, VECTOR: tl.constexpr, TILE: tl.constexpr):
    """Count the elements of each tile that are above the threshold, and those equal to it."""
    segment, _, x, inside, tile = _read_numbered(rows, num_segments, VECTOR, TILE)
    threshold = tl.load(chosen + segment)
    bits = magnitude(x)
    tl.store(before + tile, tl.sum((inside & (bits > threshold)).to(tl.int32)))
    tl.store(before + num_tiles + tile, tl.sum((inside & (bits == threshold)).to(tl.int32)))


@triton.jit(do_not_specialize=["num_segments", "num_tiles"])
def _write_kept(
    rows, chosen, before, indices, values, num_segments, num_tiles, VECTOR: tl.constexpr, TILE: tl.constexpr
):
    """Write the elements above the threshold, and the first of those equal to it, in order."""
    segment, start, x, inside, tile = _read_numbered(rows, num_segments, VECTOR, TILE)
    threshold = tl.load(chosen + segment)
    num_ties = tl.load(chosen + num_segments + segment)
    bits = magnitude(x)
    larger = (inside & (bits > threshold)).to(tl.int32)
    equal = (inside & (bits == threshold)).to(tl.int32)
    equal_before = tl.load(before + num_tiles + tile) + tl.cumsum(equal) - equal
    larger_before = tl.load(before + tile) + tl.cumsum(larger) - larger
    kept = (larger > 0) | ((equal > 0) & (equal_before < num_ties))
    # Of the ties before an element, only those that are kept take a place.
    place = tl.load(rows + 4 * num_segments + segment) + larger_before + tl.minimum(equal_before, num_ties)
    write_selected(indices, values, place, start, x, kept, TILE)
