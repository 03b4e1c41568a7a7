"""Words of equal width in Triton: each program packs or unpacks a run of its own, so that no byte has two writers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import words as family
from .fields import load_field
from .launch import launch
from .variants import VARIANTS, Variant

TILE = 256


@family._encode.runs_on("triton")
def encode(words: Tensor, bits: int, out: Tensor) -> None:
    arguments = (words, out, words.numel(), out.numel(), bits)
    launch(_encode, -(-out.numel() // TILE), out.device, *arguments, TILE=TILE)


@family._decode.runs_on("triton")
def decode(payload: Tensor, count: int, bits: int) -> Tensor:
    words = torch.empty(count, dtype=torch.int32, device=payload.device)
    launch(_decode, -(-count // TILE), payload.device, payload, words, count, bits, TILE=TILE)
    return words


@triton.jit(do_not_specialize=["count", "nbytes", "bits"])
def _encode(words, out, count, nbytes, bits, TILE: tl.constexpr):
    byte = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    packed = tl.zeros([TILE], tl.int32)
    for i in tl.static_range(8):
        position = byte * 8 + i
        word = position // bits
        value = tl.load(words + word, mask=word < count, other=0)
        packed = packed | (((value >> (position - word * bits).to(tl.int32)) & 1) << i)
    tl.store(out + byte, packed.to(tl.uint8), mask=byte < nbytes)


@triton.jit(do_not_specialize=["count", "bits"])
def _decode(payload, words, count, bits, TILE: tl.constexpr):
    word = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    tl.store(words + word, load_field(payload, word * bits, bits, word < count), mask=word < count)


_PER_WORD = 4 + 12 / 8
VARIANTS += [
    Variant("words.encode", _encode, {"TILE": TILE}, TILE * 8 // 12, _PER_WORD, cached_bytes=44),
    Variant("words.decode", _decode, {"TILE": TILE}, TILE, _PER_WORD, cached_bytes=3.5),
]
