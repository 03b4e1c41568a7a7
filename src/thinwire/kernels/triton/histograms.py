"""Top-k of large segments in Triton, exact, with ties by lowest index.

Three histograms of the magnitudes' bits (11, 10 and 10 of 31) find the count-th largest magnitude, the threshold, one
digit after each. Then one launch counts what each tile keeps, one adds the counts up, and one writes. That is nine
launches for all segments of a bucket; five of them read every element.

Atomics add to integer histograms only, so that their order does not matter. The first launch may make the segments, by
momentum correction or error feedback.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device import find_segment, magnitude
from .fields import SCAN_BLOCK, scan
from .launch import launch, pointers, starts, table
from .variants import VARIANTS, Variant

TILE = 2048
BINS = tl.constexpr(2048)


class Selecting:
    """Top-k of segments by histograms; the first launch may make the segments, see `momentum.py`.

    Args:
        xs: segments that the later launches read.
        counts: how many of each, above 0.
        at: where each segment's selection begins.
    """

    def __init__(self, xs: Sequence[Tensor], counts: list[int], at: list[int]) -> None:
        self.device, self.num_segments, self.numels = xs[0].device, len(xs), [x.numel() for x in xs]
        self.first_tile = starts([triton.cdiv(n, TILE) for n in self.numels])
        self.layout = [pointers(xs), self.numels, counts, at, self.first_tile[:-1]]

    def run(
        self, sources: list[list[int]], m: float, factor: float, source: str, indices: Tensor, values: Tensor
    ) -> None:
        """Select into `indices` and `values`.

        Args:
            sources: addresses of what the first launch makes the segments from: a list per kind of buffer.
            m: of momentum.
            factor: of the gradients.
            source: "none", or how the first launch makes the segments: see `_source`.
            indices: int32, written from `at` on.
            values: float32, written from `at` on.
        """
        device, num, tiles = self.device, self.num_segments, self.first_tile[-1]
        rows = table(device, *self.layout)
        others = table(device, *sources) if sources else rows
        # The layout of counters: for each of three passes a histogram for each segment.
        hist = torch.zeros(3 * num * BINS.value, dtype=torch.int32, device=device)
        chosen = torch.empty(2 * num, dtype=torch.int32, device=device)  # the threshold's digits so far; how many of it
        before = torch.empty(2 * tiles, dtype=torch.int32, device=device)
        totals = torch.empty(2 * num, dtype=torch.int32, device=device)
        for i in range(3):
            kind = source if i == 0 else "none"
            arguments = (rows, others, hist, chosen, num, m, factor)
            launch(_histogram, tiles, device, *arguments, PASS=i, SOURCE=kind, TILE=TILE)
            launch(_choose_digit, num, device, rows, hist, chosen, num, PASS=i)
        launch(_count_kept, tiles, device, rows, chosen, before, num, tiles, TILE=TILE)
        first = table(device, self.first_tile)
        launch(scan, num, device, first, before, totals, num, ROWS=2, BLOCK=SCAN_BLOCK)
        launch(_write_kept, tiles, device, rows, chosen, before, indices, values, num, tiles, TILE=TILE)


# ---- on the device ----


@triton.jit
def tile_of(rows, num_segments, FIRST_TILE: tl.constexpr, TILE: tl.constexpr):
    """This program's segment, where its tile starts, and how many elements follow; rows 0 and 1 are addresses and sizes."""
    segment, tile = find_segment(rows, num_segments, FIRST_TILE)
    start = tile * TILE
    return segment, start, tl.load(rows + num_segments + segment) - start


@triton.jit
def load_tile(rows, segment, start, left, TILE: tl.constexpr):
    """The elements of a tile, and which of them there are."""
    offset = tl.arange(0, TILE)
    x = tl.load(rows + segment).to(tl.pointer_type(tl.float32)) + start
    return tl.load(x + offset, mask=offset < left, other=0.0), offset < left


@triton.jit
def read_tile(rows, num_segments, FIRST_TILE: tl.constexpr, TILE: tl.constexpr):
    """This program's segment, where its tile starts there, its elements, and which of them there are."""
    segment, start, left = tile_of(rows, num_segments, FIRST_TILE, TILE)
    x, inside = load_tile(rows, segment, start, left, TILE)
    return segment, start, x, inside


@triton.jit
def write_selected(indices, values, place, start, x, kept, TILE: tl.constexpr):
    """Write the selected elements of a tile, each at its place."""
    tl.store(indices + place, (start + tl.arange(0, TILE)).to(tl.int32), mask=kept)
    tl.store(values + place, x, mask=kept)


@triton.jit(do_not_specialize=["num_segments"])
def _choose_digit(rows, hist, chosen, num_segments, PASS: tl.constexpr):
    """Append to the threshold of a segment its next digit: the largest that the wanted number of elements reach."""
    segment = tl.program_id(0)
    bins = tl.arange(0, BINS)
    numbers = tl.load(hist + (PASS * num_segments + segment) * BINS + bins)
    if PASS == 0:
        prefix = tl.zeros([], tl.int32)
        count = tl.load(rows + 2 * num_segments + segment).to(tl.int32)
    else:
        prefix = tl.load(chosen + segment) << 10
        count = tl.load(chosen + num_segments + segment)
    reach = tl.sum(numbers) - tl.cumsum(numbers) + numbers  # how many have this digit or a larger one
    digit = tl.max(tl.where(reach >= count, bins, 0))
    larger = tl.sum(tl.where(bins > digit, numbers, 0))
    tl.store(chosen + segment, prefix | digit)
    tl.store(chosen + num_segments + segment, count - larger)


@triton.jit
def source(others, segment, num_segments, start, left, m, factor, out, SOURCE: tl.constexpr, TILE: tl.constexpr):
    """Make the elements of a tile from gradients, write them to `out`, and return them; rounded as the reference does."""
    offset = tl.arange(0, TILE)
    mask = offset < left
    f32: tl.constexpr = tl.pointer_type(tl.float32)
    g = tl.load(tl.load(others + segment).to(f32) + start + offset, mask=mask, other=0.0) * factor
    held = tl.load(tl.load(others + num_segments + segment).to(f32) + start + offset, mask=mask, other=0.0)
    if SOURCE == "feedback":
        x = held + g
    else:
        v = tl.load(tl.load(others + 2 * num_segments + segment).to(f32) + start + offset, mask=mask, other=0.0)
        if SOURCE == "nesterov":
            u = (held + g) * m
            x = v + (u + g)
        else:
            u = held * m + g
            x = v + u
        tl.store(tl.load(others + 3 * num_segments + segment).to(f32) + start + offset, u, mask=mask)
    tl.store(out + start + offset, x, mask=mask)
    return x


@triton.jit(do_not_specialize=["num_segments"])
def _histogram(
    rows, others, hist, chosen, num_segments, m, factor, PASS: tl.constexpr, SOURCE: tl.constexpr, TILE: tl.constexpr
):
    """Count the next digit of the magnitudes that begin with the threshold's digits so far."""
    segment, start, left = tile_of(rows, num_segments, 4, TILE)
    if SOURCE == "none":
        x, inside = load_tile(rows, segment, start, left, TILE)
    else:
        out = tl.load(rows + segment).to(tl.pointer_type(tl.float32))
        x = source(others, segment, num_segments, start, left, m, factor, out, SOURCE, TILE)
        inside = tl.arange(0, TILE) < left
    bits = magnitude(x)
    if PASS == 0:
        digit = bits >> 20
    elif PASS == 1:
        digit = (bits >> 10) & 1023
        inside = inside & ((bits >> 20) == tl.load(chosen + segment))
    else:
        digit = bits & 1023
        inside = inside & ((bits >> 10) == tl.load(chosen + segment))
    numbers = tl.histogram(digit, BINS, mask=inside)
    bins = tl.arange(0, BINS)
    tl.atomic_add(hist + (PASS * num_segments + segment) * BINS + bins, numbers, mask=numbers > 0, sem="relaxed")


@triton.jit(do_not_specialize=["num_segments", "num_tiles"])
def _count_kept(rows, chosen, before, num_segments, num_tiles, TILE: tl.constexpr):
    """Count the elements of each tile that are above the threshold, and those equal to it."""
    program = tl.program_id(0)
    segment, start, x, inside = read_tile(rows, num_segments, 4, TILE)
    threshold = tl.load(chosen + segment)
    bits = magnitude(x)
    tl.store(before + program, tl.sum((inside & (bits > threshold)).to(tl.int32)))
    tl.store(before + num_tiles + program, tl.sum((inside & (bits == threshold)).to(tl.int32)))


@triton.jit(do_not_specialize=["num_segments", "num_tiles"])
def _write_kept(rows, chosen, before, indices, values, num_segments, num_tiles, TILE: tl.constexpr):
    """Write the elements above the threshold, and the first of those equal to it, in order."""
    program = tl.program_id(0)
    segment, start, x, inside = read_tile(rows, num_segments, 4, TILE)
    threshold = tl.load(chosen + segment)
    num_ties = tl.load(chosen + num_segments + segment)
    bits = magnitude(x)
    larger = (inside & (bits > threshold)).to(tl.int32)
    equal = (inside & (bits == threshold)).to(tl.int32)
    equal_before = tl.load(before + num_tiles + program) + tl.cumsum(equal) - equal
    larger_before = tl.load(before + program) + tl.cumsum(larger) - larger
    kept = (larger > 0) | ((equal > 0) & (equal_before < num_ties))
    place = tl.load(rows + 3 * num_segments + segment) + larger_before + tl.minimum(equal_before, num_ties)
    write_selected(indices, values, place, start, x, kept, TILE)


_TILE = {"TILE": TILE}
VARIANTS += [
    Variant(
        f"select.topk: first histogram, {_source}",
        _histogram,
        {"PASS": 0, "SOURCE": _source, **_TILE},
        TILE,
        _bytes,
        launches=9,
    )
    for _source, _bytes in (("none", 4), ("feedback", 12), ("momentum", 20), ("nesterov", 20))
]
_LAST = {"PASS": 2, "SOURCE": "none", **_TILE}
VARIANTS += [
    Variant("select.topk: last histogram", _histogram, _LAST, TILE, 4, launches=9),
    Variant("select.topk: digit", _choose_digit, {"PASS": 1}, BINS.value, 4, launches=9),
    Variant("select.topk: count", _count_kept, _TILE, TILE, 4, launches=9),
    Variant("select.topk: write", _write_kept, _TILE, TILE, 12, launches=9),  # as if everything were kept
]
