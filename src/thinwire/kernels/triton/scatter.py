"""Selected elements out of dense segments, and back into them, in Triton: one launch for all segments.

Without a race, because no index of a segment appears twice. Where a corrupt payload repeats one, the value there is one
of several, and decoding the payload has counted a fault. An index outside of its segment is a fault and touches nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..checks import numels_of
from ..flags import Fault
from .device import find
from .faults import faults_of, raise_on_cpu
from .launch import launch, pointers, starts, table
from .variants import Variant, add_variant

__all__ = ["gather", "write", "clear", "add"]

TILE = 1024
OUTSIDE = tl.constexpr(int(Fault.OUTSIDE))


def gather(xs: list[Tensor], indices: Tensor, counts: list[int]) -> Tensor:
    values = torch.zeros(indices.numel(), device=indices.device)
    _start(xs, indices, values, counts, 0.0, "gather")
    return values


def write(outs: list[Tensor], indices: Tensor, values: Tensor, counts: list[int]) -> None:
    _start(outs, indices, values, counts, 0.0, "write")


def clear(outs: list[Tensor], indices: Tensor, counts: list[int]) -> None:
    _start(outs, indices, indices, counts, 0.0, "clear")


def add(outs: list[Tensor], indices: Tensor, values: Tensor, counts: list[int], weight: float) -> None:
    _start(outs, indices, values, counts, weight, "add")


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
    tile = tl.program_id(0)
    segment = find(rows + 4 * num_segments, num_segments, tile)
    start = (tile - tl.load(rows + 4 * num_segments + segment)) * TILE
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


_SIGNATURE = {
    "rows": "*i64",
    "indices": "*i32",
    "values": "*fp32",
    "faults": "*i32",
    "num_segments": "i32",
    "weight": "fp32",
}
for _action, _bytes in (("gather", 12), ("write", 12), ("clear", 8), ("add", 16)):
    add_variant(Variant(f"scatter.{_action}", _scatter, {"ACTION": _action, "TILE": TILE}, _SIGNATURE, TILE, _bytes))
