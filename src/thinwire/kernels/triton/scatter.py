"""Selected elements out of dense segments, and back into them, in Triton: one launch for all segments.

A program serves a tile of the indices. `total` clears the segments and adds one payload after the other, a launch for each,
so that an element gets its values in the order of the payloads.

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
from ..flags import Fault, Flag, fault_counters, flag_of
from .device import find_segment, magnitude
from .launch import Launch, kept, launch, pointers, starts, tiles_of
from .reduce import mark_nonfinite

TILE = 1024
OUTSIDE = tl.constexpr(int(Fault.OUTSIDE))


@family._gather.runs_on("triton")
def gather(xs: list[Tensor], indices: Tensor, counts: list[int]) -> Tensor:
    # Zeros, because nothing is written for an index outside of its segment.
    values = torch.zeros(indices.numel(), dtype=torch.float32, device=indices.device)
    _start(xs, indices, values, counts, 0.0, "gather")
    return values


@family._gather_marked.runs_on("triton")
def gather_marked(xs: list[Tensor], indices: Tensor, counts: list[int]) -> Tensor:
    values = gather(xs, indices, counts)
    mark_nonfinite(xs, values, starts(counts)[:-1], counts)
    return values


@family._write.runs_on("triton")
def write(outs: list[Tensor], indices: Tensor, values: Tensor, counts: list[int]) -> None:
    _start(outs, indices, values, counts, 0.0, "write")


@family._clear.runs_on("triton")
def clear(outs: list[Tensor], indices: Tensor, counts: list[int]) -> None:
    # The kernel reads no values to clear, so any tensor may stand for them.
    _start(outs, indices, indices, counts, 0.0, "clear")


@family._add.runs_on("triton")
def add(outs: list[Tensor], indices: Tensor, values: Tensor, counts: list[int], weight: float) -> None:
    _start(outs, indices, values, counts, weight, "add")


@family._total.runs_on("triton")
def total(
    outs: list[Tensor], indices: list[Tensor], values: list[Tensor], counts: list[list[int]], weight: float
) -> Flag:
    device = indices[0].device
    if outs:  # PyTorch refuses an empty list
        torch._foreach_zero_(outs)
    flag = torch.ones((), dtype=torch.bool, device=device)  # whether all sums are finite
    for index, value, count in zip(indices, values, counts, strict=True):
        _start(outs, index, value, count, weight, "total", flag)
    return flag_of(flag)


def _start(
    outs: list[Tensor],
    indices: Tensor,
    values: Tensor,
    counts: list[int],
    weight: float,
    action: str,
    flag: Tensor | None = None,
) -> None:
    device = indices.device
    plan = _plan(device, tuple(numels_of(outs)), pointers(outs), tuple(counts))
    faults = fault_counters(device)
    arguments = (plan.rows, indices, values, faults, flag, len(outs), weight)
    launch(_scatter, plan.num_tiles, device, *arguments, ACTION=action, TILE=TILE)


@kept
def _plan(device: torch.device, numels: tuple[int, ...], addresses: tuple[int, ...], counts: tuple[int, ...]) -> Launch:
    return Launch.of(device, tiles_of(counts, TILE), [addresses, numels, counts, starts(counts)[:-1]])


@triton.jit(do_not_specialize=["num_segments"])
def _scatter(rows, indices, values, faults, flag, num_segments, weight, ACTION: tl.constexpr, TILE: tl.constexpr):
    """A tile is a run of kept elements of one segment. Each thread sees to its own, and none waits for others."""
    segment, tile = find_segment(rows, num_segments)
    start = tile * TILE
    out = tl.load(rows + num_segments + segment).to(tl.pointer_type(tl.float32))
    numel = tl.load(rows + 2 * num_segments + segment).to(tl.uint32)
    left = tl.minimum(tl.load(rows + 3 * num_segments + segment) - start, TILE).to(tl.int32)
    at = tl.load(rows + 4 * num_segments + segment) + start
    offset = tl.arange(0, TILE)
    mask = offset < left
    # What is loaded behind a mask is used behind it only, so it needs no value elsewhere. As unsigned numbers, negative
    # indices are large.
    index = tl.load(indices + at + offset, mask=mask).to(tl.uint32, bitcast=True)
    # A store where an addition would count: whoever reads the counter asks whether it is 0.
    tl.store(faults + OUTSIDE + offset * 0, 1, mask=mask & (index >= numel))
    inside = mask & (index < numel)
    values += at
    if ACTION == "gather":
        tl.store(values + offset, tl.load(out + index, mask=inside), mask=inside)
    elif ACTION == "clear":
        tl.store(out + index, tl.zeros([TILE], tl.float32), mask=inside)
    else:
        value = tl.load(values + offset, mask=inside)
        if ACTION == "add" or ACTION == "total":
            value = tl.load(out + index, mask=inside) + value * weight
        tl.store(out + index, value, mask=inside)
        if ACTION == "total":  # a sum that is once not finite stays so
            tl.store(flag + offset * 0, False, mask=inside & (magnitude(value) >= 0x7F800000))
