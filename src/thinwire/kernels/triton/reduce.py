"""Whether all is finite, in Triton: one launch for all segments."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import reduce as family
from ..checks import numels_of
from ..flags import Flag, flag_of
from .device import find_segment, is_finite, load_pointer, load_size
from .launch import Launch, kept, launch_each, plan_launches, pointers, tiles_of

TILE = 4096


@family._all_finite.runs_on("triton")
def all_finite(tensors: list[Tensor]) -> Flag:
    if not tensors:
        return True
    device = tensors[0].device
    flag = torch.ones((), dtype=torch.bool, device=device)
    # All segments share one place.
    mark_nonfinite(tensors, flag, [0] * len(tensors), [1] * len(tensors))
    return flag_of(flag)


def mark_nonfinite(xs: list[Tensor], out: Tensor, at: list[int], counts: list[int]) -> None:
    """Store NaN, or False, at `out[at[i]]` if segment i holds an infinite or NaN element, unless `counts[i]` is 0."""
    launches = _plan(out.device, tuple(numels_of(xs)), pointers(xs), tuple(at), tuple(counts))
    launch_each(_mark, launches, out.device, out, len(xs), NAN=out.dtype == torch.float32, TILE=TILE)


@kept
def _plan(
    device: torch.device,
    numels: tuple[int, ...],
    addresses: tuple[int, ...],
    at: tuple[int, ...],
    counts: tuple[int, ...],
) -> list[Launch]:
    return plan_launches(device, [addresses, numels, at, counts], tiles_of(numels, TILE), numels, addresses)


@triton.jit(do_not_specialize=["num_segments"])
def _mark(rows, out, num_segments, NAN: tl.constexpr, VECTOR: tl.constexpr, TILE: tl.constexpr):
    """Store NaN, or False, at a segment's place in `out` if the tile holds an infinite or NaN element.

    All programs store the same value there, so that their order does not matter.
    """
    segment, tile = find_segment(rows, num_segments)
    start = tile * TILE
    offset = tl.arange(0, TILE)
    inside = offset < load_size(rows + 2 * num_segments + segment, VECTOR) - start
    x = tl.load(load_pointer(rows + num_segments + segment, VECTOR) + start + offset, mask=inside, other=0.0)
    if tl.min(is_finite(x).to(tl.int32)) == 0:
        # A segment without values has no place of its own.
        if tl.load(rows + 4 * num_segments + segment) > 0:
            place = out + tl.load(rows + 3 * num_segments + segment)
            if NAN:
                tl.store(place, float("nan"))
            else:
                tl.store(place, False)
