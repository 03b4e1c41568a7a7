"""Top-k of large segments in Triton, exact, with ties by lowest index.

The threshold is the count-th largest magnitude. Few elements can be above it, so most are left aside at once: 4096 elements
of a segment, drawn at random, give a bound which rather more elements reach than are asked for. One launch reads the segment
and collects all that reach it, the candidates. Four histograms of the candidates' bits (7, 8, 8 and 8 of 31) each give one
digit of the threshold. Then one launch counts what is kept of each tile's candidates, one adds the counts up, and one writes.
That is nine launches for all segments of a bucket, and only one of them reads every element.

Where the bound was bad, the same launches choose from all elements of the segment instead: where fewer than the count reach it,
or so many that there is no room for them. That is so where most elements are equal, and where a large part of them is kept.

Atomics add to integers only. The order in which tiles get room for their candidates depends on chance; the result does not.
The first launch that reads the segments may make them, by momentum correction or error feedback.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...streams import uploaded
from ..checks import numels_of
from .device import find_segment, hash_of, load_pointer, load_size, magnitude
from .fields import SCAN_BLOCK, scan
from .launch import Launch, kept, launch, launch_each, plan_launches, pointers, starts, table, tiles_of

TILE = 2048
SAMPLE = 4096
PROGRAMS = 512  # of a histogram, for each segment
GROUP = 16  # tiles whose candidates one program counts, or writes
WIDTH = 64  # candidates of a tile that it reads at once: few tiles have more
BINS = tl.constexpr(256)
PASSES = tl.constexpr(4)


@dataclass(frozen=True)
class _Plan:
    """The launches of a selection.

    Their tables have these rows: first program, address, size, how many are kept, where their selection begins, first slot for
    candidates, number of slots, first tile, programs of a histogram.

    Args:
        ranks: of the bound in each segment's sample.
        collecting: launches for tiles.
        counting: for histograms; several programs serve a segment.
        choosing: for groups of tiles.
        first_group: of each segment, with the end of the last.
        num_tiles: of all segments.
        num_slots: room for candidates of all segments.
    """

    ranks: Tensor
    collecting: list[Launch]
    counting: Launch
    choosing: Launch
    first_group: Tensor
    num_tiles: int
    num_slots: int


@kept
def _plan(
    device: torch.device,
    numels: tuple[int, ...],
    counts: tuple[int, ...],
    at: tuple[int, ...],
    *addresses: tuple[int, ...],
) -> _Plan:
    ranks = [_rank(k, n) for k, n in zip(counts, numels, strict=True)]
    rooms = [_room(rank, n) for rank, n in zip(ranks, numels, strict=True)]
    tiles = tiles_of(numels, TILE)
    programs = [min(PROGRAMS, n) for n in tiles]
    groups = tiles_of(tiles, GROUP)
    rows = [addresses[0], numels, counts, at, starts(rooms)[:-1], rooms, starts(tiles)[:-1], programs]
    return _Plan(
        ranks=uploaded(device, ranks),
        collecting=plan_launches(device, rows, tiles, numels, *addresses),
        counting=Launch.of(device, programs, rows),
        choosing=Launch.of(device, groups, rows),
        first_group=uploaded(device, starts(groups)),
        num_tiles=sum(tiles),
        num_slots=sum(rooms),
    )


def _rank(count: int, numel: int) -> int:
    """The rank in the sample of the bound for `count` of `numel` elements; 0 if so many are kept that a bound is of no use.

    It is so far above what is expected that fewer than `count` elements reach it less than once in ten million times.
    """
    expected = SAMPLE * count / numel
    rank = math.ceil(expected + 6 * math.sqrt(expected) + 4)
    return rank if 4 * rank <= SAMPLE else 0


def _room(rank: int, numel: int) -> int:
    """How many candidates there is room for: more come less than once in ten million times."""
    return min(numel, math.ceil(numel * (rank + 6 * math.sqrt(rank) + 12) / SAMPLE)) if rank else 0


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
    """Top-k of segments; the launch that collects may make the segments, see `momentum.py`.

    Args:
        xs: segments that the later launches read.
        counts: how many of each, above 0.
        at: where each segment's selection begins.
        indices: int32, written from `at` on.
        values: float32, written from `at` on.
        sources: addresses of what the segments are made from: a tuple per kind of buffer.
        m: of momentum.
        factor: of the gradients.
        source: "none", or how the segments are made: see `source`.
    """
    device, num = xs[0].device, len(xs)
    plan = _plan(device, tuple(numels_of(xs)), tuple(counts), tuple(at), pointers(xs), *sources)
    others = table(device, *sources) if sources else None
    made_from = (others, num, m, factor)
    bounds = torch.empty(num, dtype=torch.int32, device=device)
    # Histograms, by digit and then by segment, and last the number of candidates.
    counters = torch.zeros(num * (PASSES.value * BINS.value + 1), dtype=torch.int32, device=device)
    hist, found = counters[:-num], counters[-num:]
    places = torch.empty(2 * plan.num_tiles, dtype=torch.int32, device=device)
    chosen = torch.empty(2 * num * (PASSES.value + 1), dtype=torch.int32, device=device)
    before = torch.empty(2 * plan.num_tiles, dtype=torch.int32, device=device)
    groups = torch.empty(2 * plan.choosing.num_tiles, dtype=torch.int32, device=device)
    totals = torch.empty(2 * num, dtype=torch.int32, device=device)
    candidates = torch.empty(plan.num_slots, dtype=torch.float32, device=device)
    positions = torch.empty(plan.num_slots, dtype=torch.int32, device=device)
    launch(_sample, num, device, plan.counting.rows, plan.ranks, bounds, *made_from, SOURCE=source, SAMPLE=SAMPLE)
    arguments = (bounds, found, places, candidates, positions, plan.num_tiles, *made_from)
    launch_each(_collect, plan.collecting, device, *arguments, SOURCE=source, TILE=TILE)
    counting = (plan.counting.rows, found, candidates, hist, chosen, num)
    for i in range(PASSES.value):
        launch(_histogram, plan.counting.num_tiles, device, *counting, PASS=i, TILE=TILE)
    shape = {"TILE": TILE, "GROUP": GROUP, "WIDTH": WIDTH}
    rows, num_groups = plan.choosing.rows, plan.choosing.num_tiles
    tiles = (rows, found, candidates, places, chosen, before, groups, num, plan.num_tiles)
    launch(_count_kept, num_groups, device, *tiles, hist, **shape)
    launch(scan, num, device, plan.first_group, groups, totals, num, ROWS=2, BLOCK=SCAN_BLOCK)
    launch(_write_kept, num_groups, device, *tiles, positions, indices, values, **shape)


# ---- on the device ----


@triton.jit
def tile_of(rows, num_segments, VECTOR: tl.constexpr, TILE: tl.constexpr):
    """This program's segment, where its tile starts, and how many elements follow; rows 1 and 2 are addresses and sizes."""
    segment, tile = find_segment(rows, num_segments)
    start = tile * TILE
    return segment, start, load_size(rows + 2 * num_segments + segment, VECTOR) - start


@triton.jit
def offsets(TILE: tl.constexpr):
    """Of the elements of a tile, in rows of four: as many as a thread loads at once."""
    return 4 * tl.arange(0, TILE // 4)[:, None] + tl.arange(0, 4)[None, :]


@triton.jit
def ranks(flags):
    """How many of a tile's flags are set before each, and how many in all; in rows, because a cumulative sum costs much."""
    in_row = tl.sum(flags, axis=1)
    before = (tl.cumsum(in_row) - in_row)[:, None]
    return before + tl.cumsum(flags, axis=1) - flags, tl.sum(in_row)


@triton.jit
def source(
    others,
    segment,
    num_segments,
    start,
    offset,
    mask,
    m,
    factor,
    out,
    SOURCE: tl.constexpr,
    VECTOR: tl.constexpr,
    STORE: tl.constexpr,
):
    """Make the elements at `start + offset` from gradients, rounded as the reference does; if `STORE`, write them to `out`."""
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
        if STORE:
            tl.store(load_pointer(others + 3 * num_segments + segment, VECTOR) + start + offset, u, mask=mask)
    if STORE:
        tl.store(out + start + offset, x, mask=mask)
    return x


@triton.jit(do_not_specialize=["num_segments"])
def _sample(rows, ranks, bounds, others, num_segments, m, factor, SOURCE: tl.constexpr, SAMPLE: tl.constexpr):
    """The bound of a segment: of its sample's magnitudes, the one of the rank; above all if the rank is 0."""
    segment = tl.program_id(0)
    numel = tl.load(rows + 2 * num_segments + segment)
    offset = ((hash_of(numel, tl.arange(0, SAMPLE).to(tl.uint32)).to(tl.int64) * numel) >> 32).to(tl.int32)
    out = load_pointer(rows + num_segments + segment, 1)
    if SOURCE == "none":
        x = tl.load(out + offset)
    else:
        x = source(others, segment, num_segments, 0, offset, offset >= 0, m, factor, out, SOURCE, 1, False)
    bits = magnitude(x)
    rank = tl.load(ranks + segment).to(tl.int32)
    bound = tl.zeros([], tl.int32)
    for i in range(31):  # a magnitude has no sign bit
        higher = bound | (1 << (30 - i))
        bound = tl.where(tl.sum((bits >= higher).to(tl.int32)) >= rank, higher, bound)
    # Zeros are no candidates: in many gradients most elements are.
    tl.store(bounds + segment, tl.maximum(bound, 1))


@triton.jit(do_not_specialize=["num_segments", "num_tiles"])
def _collect(
    rows,
    bounds,
    found,
    places,
    candidates,
    positions,
    num_tiles,
    others,
    num_segments,
    m,
    factor,
    SOURCE: tl.constexpr,
    VECTOR: tl.constexpr,
    TILE: tl.constexpr,
):
    """Append a tile's candidates, in order, to those of its segment; note where they begin, and their number."""
    segment, start, left = tile_of(rows, num_segments, VECTOR, TILE)
    offset = offsets(TILE)
    out, inside = load_pointer(rows + num_segments + segment, VECTOR), offset < left
    if SOURCE == "none":
        x = tl.load(out + start + offset, mask=inside, other=0.0)
    else:
        x = source(others, segment, num_segments, start, offset, inside, m, factor, out, SOURCE, VECTOR, True)
    is_candidate = inside & (magnitude(x) >= tl.load(bounds + segment))
    rank, total = ranks(is_candidate.to(tl.int32))
    first = tl.atomic_add(found + segment, total, sem="relaxed")
    tile = tl.load(rows + 7 * num_segments + segment) + start // TILE
    tl.store(places + tile, first)
    tl.store(places + num_tiles + tile, total)
    # What has no room is not written; then the segment itself is chosen from.
    fits = is_candidate & (rank < tl.load(rows + 6 * num_segments + segment).to(tl.int32) - first)
    slot = tl.load(rows + 5 * num_segments + segment) + first
    tl.store(candidates + slot + rank, x, mask=fits)
    tl.store(positions + slot + rank, start.to(tl.int32) + offset, mask=fits)


@triton.jit
def _choices(rows, segment, num_segments, found, candidates):
    """What to choose from: whether it is the segment's candidates, the pointer to the first, and how many there are."""
    x = load_pointer(rows + num_segments + segment, 1)
    size = tl.load(rows + 2 * num_segments + segment)
    number = tl.load(found + segment).to(tl.int64)
    count = tl.load(rows + 3 * num_segments + segment)
    is_bounded = (number >= count) & (number <= tl.load(rows + 6 * num_segments + segment))
    if is_bounded:
        x = candidates + tl.load(rows + 5 * num_segments + segment)
        size = number
    return is_bounded, x, size


@triton.jit
def _digits(rows, segment, num_segments, hist, chosen, PASS: tl.constexpr):
    """The threshold's first digits, and how many of the elements that begin with them are kept.

    The next digit is the largest that the wanted number of elements reach. All programs of a segment find the same one, and
    store it for the next launch.
    """
    if PASS == 0:
        prefix = tl.zeros([], tl.int32)
        count = tl.load(rows + 3 * num_segments + segment).to(tl.int32)
    else:
        bins = tl.arange(0, BINS)
        numbers = tl.load(hist + ((PASS - 1) * num_segments + segment) * BINS + bins)
        count = tl.load(chosen + (2 * PASS - 1) * num_segments + segment)
        reach = tl.sum(numbers) - tl.cumsum(numbers) + numbers  # how many have this digit or a larger one
        digit = tl.max(tl.where(reach >= count, bins, 0))
        count -= tl.sum(tl.where(bins > digit, numbers, 0))
        prefix = (tl.load(chosen + (2 * PASS - 2) * num_segments + segment) << 8) | digit
    tl.store(chosen + 2 * PASS * num_segments + segment, prefix)
    tl.store(chosen + (2 * PASS + 1) * num_segments + segment, count)
    return prefix, count


@triton.jit(do_not_specialize=["num_segments"])
def _histogram(rows, found, candidates, hist, chosen, num_segments, PASS: tl.constexpr, TILE: tl.constexpr):
    """Count the next digit of the magnitudes that begin with the threshold's digits so far."""
    segment, program = find_segment(rows, num_segments)
    prefix, _ = _digits(rows, segment, num_segments, hist, chosen, PASS)
    _, x, size = _choices(rows, segment, num_segments, found, candidates)
    offset, bins = tl.arange(0, TILE), tl.arange(0, BINS)
    numbers = tl.zeros([BINS], tl.int32)
    for start in range(program * TILE, size, tl.load(rows + 8 * num_segments + segment) * TILE):
        inside = offset < size - start
        digits = magnitude(tl.load(x + start + offset, mask=inside, other=0.0)) >> (24 - 8 * PASS)
        if PASS > 0:
            inside = inside & ((digits >> 8) == prefix)
        numbers += tl.histogram(digits & 255, BINS, mask=inside)
    tl.atomic_add(hist + (PASS * num_segments + segment) * BINS + bins, numbers, mask=numbers > 0, sem="relaxed")


@triton.jit
def _tiles_of_group(
    rows, segment, num_segments, group, is_bounded, places, num_tiles, TILE: tl.constexpr, GROUP: tl.constexpr
):
    """The numbers of a group's tiles, whether they exist, and the first choice and the number of choices of each."""
    tile = group * GROUP + tl.arange(0, GROUP)
    first = tile * TILE
    left = tl.load(rows + 2 * num_segments + segment) - first
    exists = left > 0
    size = tl.minimum(tl.maximum(left, 0), TILE).to(tl.int32)
    tile += tl.load(rows + 7 * num_segments + segment)
    if is_bounded:
        first = tl.load(places + tile, mask=exists, other=0).to(tl.int64)
        size = tl.load(places + num_tiles + tile, mask=exists, other=0)
    return tile, exists, first, size


@triton.jit(do_not_specialize=["num_segments", "num_tiles"])
def _count_kept(
    rows,
    found,
    candidates,
    places,
    chosen,
    before,
    groups,
    num_segments,
    num_tiles,
    hist,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Count the choices above the threshold, and those equal to it: in each group, and in the group before each tile."""
    segment, group = find_segment(rows, num_segments)
    threshold, _ = _digits(rows, segment, num_segments, hist, chosen, PASSES)
    is_bounded, x, _ = _choices(rows, segment, num_segments, found, candidates)
    tile, exists, first, size = _tiles_of_group(
        rows, segment, num_segments, group, is_bounded, places, num_tiles, TILE, GROUP
    )
    num_larger, num_equal = tl.zeros([GROUP], tl.int32), tl.zeros([GROUP], tl.int32)
    for j in range(0, tl.max(size), WIDTH):
        slot = j + tl.arange(0, WIDTH)[None, :]
        inside = slot < size[:, None]
        bits = magnitude(tl.load(x + (first[:, None] + slot), mask=inside, other=0.0))
        num_larger += tl.sum((inside & (bits > threshold)).to(tl.int32), axis=1)
        num_equal += tl.sum((inside & (bits == threshold)).to(tl.int32), axis=1)
    tl.store(before + tile, tl.cumsum(num_larger) - num_larger, mask=exists)
    tl.store(before + num_tiles + tile, tl.cumsum(num_equal) - num_equal, mask=exists)
    program = tl.program_id(0)
    tl.store(groups + program, tl.sum(num_larger))
    tl.store(groups + tl.num_programs(0) + program, tl.sum(num_equal))


@triton.jit(do_not_specialize=["num_segments", "num_tiles"])
def _write_kept(
    rows,
    found,
    candidates,
    places,
    chosen,
    before,
    groups,
    num_segments,
    num_tiles,
    positions,
    indices,
    values,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write the choices above the threshold, and the first of those equal to it, in order."""
    segment, group = find_segment(rows, num_segments)
    threshold = tl.load(chosen + 2 * PASSES * num_segments + segment)
    num_ties = tl.load(chosen + (2 * PASSES + 1) * num_segments + segment)
    is_bounded, x, _ = _choices(rows, segment, num_segments, found, candidates)
    tile, exists, first, size = _tiles_of_group(
        rows, segment, num_segments, group, is_bounded, places, num_tiles, TILE, GROUP
    )
    program = tl.program_id(0)
    larger_before = tl.load(before + tile, mask=exists, other=0) + tl.load(groups + program)
    equal_before = tl.load(before + num_tiles + tile, mask=exists, other=0)
    equal_before += tl.load(groups + tl.num_programs(0) + program)
    at = tl.load(rows + 4 * num_segments + segment)
    positions += tl.load(rows + 5 * num_segments + segment)
    for j in range(0, tl.max(size), WIDTH):
        slot = j + tl.arange(0, WIDTH)[None, :]
        inside = slot < size[:, None]
        choice = first[:, None] + slot
        value = tl.load(x + choice, mask=inside, other=0.0)
        index = choice.to(tl.int32)
        if is_bounded:
            index = tl.load(positions + choice, mask=inside, other=0)
        bits = magnitude(value)
        larger = (inside & (bits > threshold)).to(tl.int32)
        equal = (inside & (bits == threshold)).to(tl.int32)
        ties = equal_before[:, None] + tl.cumsum(equal, axis=1) - equal
        # Of the ties before an element, only those that are kept take a place.
        place = larger_before[:, None] + tl.cumsum(larger, axis=1) - larger + tl.minimum(ties, num_ties)
        is_kept = (larger > 0) | ((equal > 0) & (ties < num_ties))
        tl.store(indices + at + place, index, mask=is_kept)
        tl.store(values + at + place, value, mask=is_kept)
        larger_before += tl.sum(larger, axis=1)
        equal_before += tl.sum(equal, axis=1)
