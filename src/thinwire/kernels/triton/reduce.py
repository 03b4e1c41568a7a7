"""Whether all is finite, in Triton: one launch for all segments."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import reduce as family
from ..checks import numels_of
from ..flags import Flag, flag_of
from .device import find, is_finite
from .launch import launch, pointers, starts, table
from .variants import Variant, add_variant

TILE = 4096


@family._all_finite.runs_on("triton")
def all_finite(tensors: list[Tensor]) -> Flag:
    if not tensors:
        return True
    device = tensors[0].device
    bad = torch.zeros(1, dtype=torch.int32, device=device)
    _find_nonfinite(tensors, bad, [0] * len(tensors), [1] * len(tensors))
    return flag_of(bad[0] == 0)


@family._mark_nonfinite.runs_on("triton")
def mark_nonfinite(xs: list[Tensor], values: Tensor, counts: list[int]) -> None:
    _find_nonfinite(xs, values, starts(counts)[:-1], counts)


def _find_nonfinite(xs: list[Tensor], out: Tensor, at: list[int], counts: list[int]) -> None:
    first_tile = starts([triton.cdiv(x.numel(), TILE) for x in xs])
    rows = table(out.device, pointers(xs), numels_of(xs), at, counts, first_tile[:-1])
    launch(_mark, first_tile[-1], out.device, rows, out, len(xs), NAN=out.dtype == torch.float32, TILE=TILE)


@triton.jit(do_not_specialize=["num_segments"])
def _mark(rows, out, num_segments, NAN: tl.constexpr, TILE: tl.constexpr):
    """Store NaN, or 1, at a segment's place in `out` if the tile holds an infinite or NaN element.

    All programs store the same value there, so that their order does not matter.
    """
    tile = tl.program_id(0)
    segment = find(rows + 4 * num_segments, num_segments, tile)
    start = (tile - tl.load(rows + 4 * num_segments + segment)) * TILE
    offset = tl.arange(0, TILE)
    inside = offset < tl.load(rows + num_segments + segment) - start
    x = tl.load(tl.load(rows + segment).to(tl.pointer_type(tl.float32)) + start + offset, mask=inside, other=0.0)
    if tl.min(is_finite(x).to(tl.int32)) == 0:
        if tl.load(rows + 3 * num_segments + segment) > 0:
            place = out + tl.load(rows + 2 * num_segments + segment)
            if NAN:
                tl.store(place, float("nan"))
            else:
                tl.store(place, 1)


for _name, _nan in (("all_finite", False), ("mark_nonfinite", True)):
    add_variant(
        Variant(
            f"reduce.{_name}",
            _mark,
            {"NAN": _nan, "TILE": TILE},
            {"rows": "*i64", "out": "*fp32" if _nan else "*i32", "num_segments": "i32"},
            TILE,
            4,
        )
    )
