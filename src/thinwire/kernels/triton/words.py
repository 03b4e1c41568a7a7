"""Words of equal width in Triton, one launch for all segments.

Each program packs or unpacks a run of its own, so that no byte has two writers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import words as family
from .device import find_segment
from .fields import load_field
from .launch import Launch, kept, launch, starts, tiles_of

TILE = 256


@family._encode.runs_on("triton")
def encode(words: Tensor, counts: list[int], bits: int, out: Tensor) -> None:
    plan = _plan(out.device, tuple(counts), bits, "bytes")
    launch(_encode, plan.num_tiles, out.device, plan.rows, words, out, len(counts), bits, TILE=TILE)


@family._decode.runs_on("triton")
def decode(payload: Tensor, counts: list[int], bits: int) -> Tensor:
    words = torch.empty(sum(counts), dtype=torch.int32, device=payload.device)
    plan = _plan(payload.device, tuple(counts), bits, "words")
    launch(_decode, plan.num_tiles, payload.device, plan.rows, payload, words, len(counts), bits, TILE=TILE)
    return words


@kept
def _plan(device: torch.device, counts: tuple[int, ...], bits: int, tiles: str) -> Launch:
    """For tiles of bytes, or of words. The rows: first tile, words, first word, first byte of each segment."""
    sizes = [family.nbytes(count, bits) for count in counts]
    tiles_of_each = tiles_of(sizes if tiles == "bytes" else counts, TILE)
    return Launch.of(device, tiles_of_each, [counts, starts(counts)[:-1], starts(sizes)[:-1]])


@triton.jit
def _find_run(rows, words, payload, num_segments, TILE: tl.constexpr):
    """A program's run of bytes or words, the words of its segment, and pointers to the segment's words and bytes."""
    segment, tile = find_segment(rows, num_segments)
    position = tile * TILE + tl.arange(0, TILE)
    count = tl.load(rows + num_segments + segment)
    words += tl.load(rows + 2 * num_segments + segment)
    return position, count, words, payload + tl.load(rows + 3 * num_segments + segment)


@triton.jit(do_not_specialize=["num_segments", "bits"])
def _encode(rows, words, out, num_segments, bits, TILE: tl.constexpr):
    byte, count, words, out = _find_run(rows, words, out, num_segments, TILE)
    packed = tl.zeros([TILE], tl.int32)
    for i in tl.static_range(8):
        position = byte * 8 + i
        # Without bits there are no bytes and no programs, so nothing is divided by zero.
        word = position // bits
        value = tl.load(words + word, mask=word < count, other=0)
        packed = packed | (((value >> (position - word * bits).to(tl.int32)) & 1) << i)
    tl.store(out + byte, packed.to(tl.uint8), mask=byte * 8 < count * bits)


@triton.jit(do_not_specialize=["num_segments", "bits"])
def _decode(rows, payload, words, num_segments, bits, TILE: tl.constexpr):
    word, count, words, payload = _find_run(rows, words, payload, num_segments, TILE)
    tl.store(words + word, load_field(payload, word * bits, bits, word < count), mask=word < count)
