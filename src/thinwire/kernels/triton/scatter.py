"""Selected elements out of dense segments, and back into them, in Triton: one launch for all segments.

`total` has one program per tile of the segments. It looks up every element in each payload, so that it writes each
element once, in the order of payloads. All others have one program per tile of the indices.

Without a race, because no index of a segment appears twice. Where a corrupt payload repeats one, the value there is one
of several, and decoding the payload has counted a fault. An index outside of its segment is a fault and touches nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import scatter as family
from ..checks import numels_of
from ..flags import Fault, Flag, flag_of
from .device import find_segment
from .faults import faults_of, raise_on_cpu
from .launch import launch, pointers, starts, table
from .payloads import store_total
from .variants import VARIANTS, Variant

TILE = 1024
TOTAL_TILE = 2048
OUTSIDE = tl.constexpr(int(Fault.OUTSIDE))


@family._gather.runs_on("triton")
def gather(xs: list[Tensor], indices: Tensor, counts: list[int]) -> Tensor:
    values = torch.zeros(indices.numel(), device=indices.device)
    _start(xs, indices, values, counts, 0.0, "gather")
    return values


@family._write.runs_on("triton")
def write(outs: list[Tensor], indices: Tensor, values: Tensor, counts: list[int]) -> None:
    _start(outs, indices, values, counts, 0.0, "write")


@family._clear.runs_on("triton")
def clear(outs: list[Tensor], indices: Tensor, counts: list[int]) -> None:
    _start(outs, indices, indices, counts, 0.0, "clear")


@family._add.runs_on("triton")
def add(outs: list[Tensor], indices: Tensor, values: Tensor, counts: list[int], weight: float) -> None:
    _start(outs, indices, values, counts, weight, "add")


@family._total.runs_on("triton")
def total(
    outs: list[Tensor], indices: list[Tensor], values: list[Tensor], counts: list[list[int]], weight: float
) -> Flag:
    device, numels = indices[0].device, numels_of(outs)
    first_tile, entries = starts([-(-n // TOTAL_TILE) for n in numels]), []
    for index, value, count in zip(indices, values, counts, strict=True):
        at = starts(count)[:-1]
        entries += [[t.data_ptr() + 4 * i for i in at] for t in (index, value)] + [count]
    rows = table(device, pointers(outs), numels, first_tile[:-1], *entries)
    flag, faults = torch.zeros(1, dtype=torch.int32, device=device), faults_of(device)
    arguments = (rows, flag, faults, len(outs), len(indices), weight)
    launch(_total, first_tile[-1], device, *arguments, TILE=TOTAL_TILE)
    raise_on_cpu(faults)
    return flag_of(flag[0] == 0)


def _start(outs: list[Tensor], indices: Tensor, values: Tensor, counts: list[int], weight: float, action: str) -> None:
    device = indices.device
    first_tile = starts([-(-k // TILE) for k in counts])
    rows = table(device, pointers(outs), numels_of(outs), counts, starts(counts)[:-1], first_tile[:-1])
    faults = faults_of(device)
    arguments = (rows, indices, values, faults, len(outs), weight)
    launch(_scatter, first_tile[-1], device, *arguments, ACTION=action, TILE=TILE)
    raise_on_cpu(faults)


@triton.jit(do_not_specialize=["num_segments"])
def _scatter(rows, indices, values, faults, num_segments, weight, ACTION: tl.constexpr, TILE: tl.constexpr):
    """A tile is a run of kept elements of one segment."""
    segment, tile = find_segment(rows, num_segments, 4)
    start = tile * TILE
    out = tl.load(rows + segment).to(tl.pointer_type(tl.float32))
    numel = tl.load(rows + num_segments + segment)
    left = tl.load(rows + 2 * num_segments + segment) - start
    at = tl.load(rows + 3 * num_segments + segment) + start
    offset = tl.arange(0, TILE)
    mask = offset < left
    index = tl.load(indices + at + offset, mask=mask, other=0)
    inside = mask & (index >= 0) & (index < numel)
    if tl.sum((mask & ~inside).to(tl.int32)) > 0:
        tl.atomic_add(faults + OUTSIDE, 1, sem="relaxed")
    if ACTION == "gather":
        tl.store(values + at + offset, tl.load(out + index, mask=inside, other=0.0), mask=inside)
    elif ACTION == "clear":
        tl.store(out + index, tl.zeros([TILE], tl.float32), mask=inside)
    else:
        value = tl.load(values + at + offset, mask=inside, other=0.0)
        if ACTION == "add":
            value = tl.load(out + index, mask=inside, other=0.0) + value * weight
        tl.store(out + index, value, mask=inside)


@triton.jit
def lower_bound(indices, count, value):
    """How many of `count` ascending indices are less than a value."""
    low = tl.zeros([], tl.int64)
    while count > 0:
        half = count // 2
        if tl.load(indices + low + half) < value:
            low += half + 1
            count -= half + 1
        else:
            count = half
    return low


@triton.jit(do_not_specialize=["num_segments", "num_payloads"])
def _total(rows, flag, faults, num_segments, num_payloads, weight, TILE: tl.constexpr):
    """A tile is a run of elements of one segment: find the payload's indices there, then each element among them."""
    segment, tile = find_segment(rows, num_segments, 2)
    start = tile * TILE
    out = tl.load(rows + segment).to(tl.pointer_type(tl.float32)) + start
    numel = tl.load(rows + num_segments + segment)
    offset = tl.arange(0, TILE)
    position = start + offset
    total = tl.zeros([TILE], tl.float32)
    for i in range(num_payloads):
        entry = rows + (3 + 3 * i) * num_segments + segment
        indices = tl.load(entry).to(tl.pointer_type(tl.int32))
        values = tl.load(entry + num_segments).to(tl.pointer_type(tl.float32))
        count = tl.load(entry + 2 * num_segments)
        if (count > 0) & (start == 0):
            if (tl.load(indices) < 0) | (tl.load(indices + count - 1) >= numel):
                tl.atomic_add(faults + OUTSIDE, 1, sem="relaxed")
        low = lower_bound(indices, count, start)
        left = lower_bound(indices + low, count - low, start + TILE)
        indices += low
        values += low
        # All elements halve their ranges together: of `size` indices, at least one is left.
        at = tl.zeros([TILE], tl.int64)
        size = left
        while size > 1:
            half = size // 2
            at = tl.where(tl.load(indices + at + half) <= position, at + half, at)
            size -= half
        found = (offset >= 0) & (left > 0)
        found &= tl.load(indices + at, mask=found, other=-1) == position
        value = tl.load(values + at, mask=found, other=0.0)
        total = tl.where(found, total + value * weight, total)
    store_total(out + offset, position < numel, total, flag, False)


VARIANTS += [
    Variant(f"scatter.{_action}", _scatter, {"ACTION": _action, "TILE": TILE}, TILE, _bytes)
    for _action, _bytes in (("gather", 12), ("write", 12), ("clear", 8), ("add", 16))
]
# Where one element in 100 is kept, a search takes six steps; all loads are counted as its.
VARIANTS.append(
    Variant("scatter.total, one payload", _total, {"TILE": TOTAL_TILE}, TOTAL_TILE, 4, 6 * 12, loop_trips=6)
)
