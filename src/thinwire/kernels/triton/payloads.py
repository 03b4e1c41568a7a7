"""What encoders and decoders of dense payloads share: the table of segments, residuals, and the sum of payloads.

A payload holds float32 numbers and then bit-packed codes. Its table has these rows: first tile, address, address of the
residual, size, index of the first number's bucket, offset of the first code in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..checks import MAX_SEGMENT_NUMEL
from ..flags import Flag, flag_of
from .device import load_pointer, magnitude
from .launch import Launch, are_aligned, launch_each, pointers, table

WHOLE = tl.constexpr(MAX_SEGMENT_NUMEL)  # the size of a bucket that is its segment


def launch_decoder(
    decoder: Any,
    launches: list[Launch],
    payloads: list[Tensor],
    outs: list[Tensor],
    weight: float,
    add: bool,
    constants: Mapping[str, Any],
    *tables: Tensor | None,
    sources: Tensor | None = None,
) -> Flag:
    """Add one payload to `outs`, or overwrite them with the sum of several; returns whether the sum is finite.

    Args:
        decoder: the kernel. It gets `rows, sources, *tables, flag, num_segments, num_payloads, weight`.
        launches: of the segments.
        payloads: what to add.
        outs: the segments.
        weight: factor of all values.
        add: whether to keep what is there, and add the one payload.
        constants: of this kind of decoder.
        tables: of this kind of decoder.
        sources: by default, the addresses of the payloads.
    """
    device = payloads[0].device
    # With `add` no kernel changes or reads the flag, so it may hold anything.
    flag = (torch.empty if add else torch.ones)((), dtype=torch.bool, device=device)  # whether all sums are finite
    sources = table(device, pointers(payloads)) if sources is None else sources
    arguments = (sources, *tables, flag, len(outs), len(payloads), weight)
    launch_each(decoder, launches, device, *arguments, ADD=add, ALIGNED=are_aligned(*payloads), **constants)
    return True if add else flag_of(flag)


@triton.jit
def store_residual(rows, num_segments, segment, position, inside, lost, VECTOR: tl.constexpr):
    """Store the error of a tile's codes. The residual may be the segment: all threads have read it before any writes."""
    residual = load_pointer(rows + 2 * num_segments + segment, VECTOR)
    tl.debug_barrier()
    tl.store(residual + position, lost, mask=inside)


@triton.jit
def load_total(pointer, inside, ADD: tl.constexpr):
    """The initial total of a decoder: the elements at `pointer`, a tensor of pointers, or zeros."""
    if ADD:
        total = tl.load(pointer, mask=inside, other=0.0)
    else:
        total = tl.zeros(inside.shape, tl.float32)
    return total


@triton.jit
def store_total(pointer, inside, total, flag, ADD: tl.constexpr):
    """Store a sum. Clear the flag if a sum of payloads is not finite: any program may do it, so their order is free."""
    tl.store(pointer, total, mask=inside)
    if not ADD:
        largest = tl.max(tl.where(inside, magnitude(total), 0))
        tl.store(flag, False, mask=largest >= 0x7F800000)
