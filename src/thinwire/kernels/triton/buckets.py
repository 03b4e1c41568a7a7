"""One encoder and one decoder for all codes of elements in buckets; a family gives the rule that rounds an element.

A payload holds 0 to 2 float32 numbers for each bucket, such as its scale, and then a code for each element. A program
serves a tile, whose rows are buckets where that fits; see `Coding.tile`. It then finds the scales itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..checks import numels_of
from ..flags import Flag
from ..random import keys_on
from .block_sums import store_scales
from .device import (
    by_row,
    find_segment,
    flat,
    load_codes,
    load_floats,
    load_pointer,
    load_size,
    magnitude,
    negated,
    position_of,
    scale_of_magnitude,
    scale_of_sums,
    store_codes,
    store_floats,
    sums_of_squares,
    tile_offsets,
    uniform,
)
from .launch import Launch, are_aligned, floats, kept, launch_each, plan_launches, pointers, starts, tiles_of
from .payloads import WHOLE, launch_decoder, load_total, store_residual, store_total

TILE = 2048  # elements of a tile, but for a bucket that is larger
MAX_BUCKET = 8192  # a larger bucket is not held by one program


@dataclass(frozen=True)
class Coding:
    """How the elements of buckets are coded.

    Args:
        bits: of a code.
        bucket_size: elements of a bucket; `MAX_SEGMENT_NUMEL` makes each segment one.
        encode_rule: the `triton.jit` function `(x, first, second, u, level_table, PARAMETERS)` that gives the codes of
            elements, and the values that they decode to. `first` and `second` are the numbers of the element's bucket,
            1 where there are none, and the first again where there is one; `u` is random, or 0 without keys.
        decode_rule: the function `(codes, first, second, weight, level_table, PARAMETERS)` that gives the values times
            the weight.
        parameters: constants of both rules.
        numbers: of a bucket, 0 to 2.
        norm: "max" or "l2" where the encoder finds the scale of a bucket; "" where the payload has its numbers already.
        least, most: scales below `least` become 0, and above `most` infinite.
        levels: values for the rules, which find them in `level_table`.
        least_buckets: buckets of an empty segment.
        keeps_sign: whether a sum of zeros is -0 where all of them are. Otherwise, it is 0.
    """

    bits: int
    bucket_size: int
    encode_rule: Any
    decode_rule: Any
    parameters: tuple[int, ...]
    numbers: int = 1
    norm: str = ""
    least: float = 0.0
    most: float = float("inf")
    levels: tuple[float, ...] | None = None
    least_buckets: int = 0
    keeps_sign: bool = False

    @property
    def has_bucket_rows(self) -> bool:
        """Whether a row of a tile is a bucket, so that one scale serves it: not if its codes may share a byte with the next."""
        return self.bucket_size % 8 == 0 and self.bucket_size <= MAX_BUCKET

    @property
    def tile(self) -> dict[str, int]:
        """The constants of a tile, which is what one program serves; see `device.py`."""
        if not self.has_bucket_rows:
            return {"SIZE": TILE // 4, "WIDTH": TILE // 4, "ROWS": 4}
        width = 1 << (self.bucket_size - 1).bit_length()
        return {"SIZE": self.bucket_size, "WIDTH": width, "ROWS": max(1, TILE // width)}

    def encode(
        self, xs: list[Tensor], out: Tensor, residuals: list[Tensor] | None, keys: list[int] | None = None
    ) -> None:
        """Write the codes, the numbers if the encoder finds them, and the residuals."""
        device = out.device
        # A program that does not hold whole buckets cannot find their scales.
        if self.norm and not self.has_bucket_rows:
            store_scales(xs, out, self.bucket_size, self.norm, self.least, self.most)
        tables = None if keys is None else keys_on(keys, device), self._level_table(device)
        constants = {
            **self._constants(),
            "RULE": self.encode_rule,
            "NORM": self.norm if self.has_bucket_rows else "",
            "LEAST": self.least,
            "MOST": self.most,
            "RESIDUAL": residuals is not None,
            "ALIGNED": are_aligned(out),
        }
        launch_each(_encode, self._launches(xs, residuals, device), device, *tables, out, len(xs), **constants)

    def decode(self, payloads: list[Tensor], outs: list[Tensor], weight: float, add: bool) -> Flag:
        """Add one payload to `outs`, or overwrite them with the sum of several; returns whether the sum is finite."""
        device = payloads[0].device
        launches, levels = self._launches(outs, None, device), self._level_table(device)
        constants = {**self._constants(), "RULE": self.decode_rule, "KEEPS_SIGN": self.keeps_sign}
        return launch_decoder(_decode, launches, payloads, outs, weight, add, constants, levels)

    def _launches(self, xs: list[Tensor], residuals: list[Tensor] | None, device: torch.device) -> list[Launch]:
        return _plan(device, self, tuple(numels_of(xs)), pointers(xs), pointers(residuals, len(xs)))

    def _level_table(self, device: torch.device) -> Tensor | None:
        return None if self.levels is None else floats(device, self.levels)

    def _constants(self) -> dict[str, Any]:
        return {
            "PARAMETERS": self.parameters,
            "NUMBERS": self.numbers,
            "BITS": self.bits,
            "BUCKET": self.bucket_size,
            **self.tile,
        }


@kept
def _plan(
    device: torch.device,
    coding: Coding,
    numels: tuple[int, ...],
    addresses: tuple[int, ...],
    residuals: tuple[int, ...],
) -> list[Launch]:
    num_buckets = [max(coding.least_buckets, count) for count in tiles_of(numels, coding.bucket_size)]
    code_bytes = [(n * coding.bits + 7) // 8 for n in numels]
    first_code = starts(code_bytes, 4 * coding.numbers * sum(num_buckets))
    rows = [addresses, residuals, numels, starts(num_buckets)[:-1], first_code[:-1]]
    tile = coding.tile
    tiles = tiles_of(numels, tile["SIZE"] * tile["ROWS"])
    return plan_launches(device, rows, tiles, numels, addresses, residuals, codes=first_code[:-1])


@triton.jit
def _find_tile(
    rows,
    num_segments,
    BUCKET: tl.constexpr,
    VECTOR: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Where a program's tile lies, and its buckets.

    Returns the segment, the tile's start in it, the pointer to the start, the tile's elements, each element's offset,
    whether it is one, the index of each row's or of each element's bucket, and whether there is such a bucket.
    """
    segment, tile = find_segment(rows, num_segments)
    first_row = tile * ROWS
    start = first_row * SIZE
    pointer = load_pointer(rows + num_segments + segment, VECTOR) + start
    left = load_size(rows + 3 * num_segments + segment, VECTOR) - start
    numel = tl.minimum(left, ROWS * SIZE).to(tl.int32)
    if VECTOR > 1:
        numel = tl.multiple_of(numel, 4 if VECTOR == 4 else 8)
    offset, inside = tile_offsets(SIZE, WIDTH, ROWS)
    inside = inside & (offset < numel)
    first = tl.load(rows + 4 * num_segments + segment)
    row = tl.arange(0, ROWS)[None, :, None]
    if SIZE == BUCKET:
        index = first + first_row + row
        exists = row * SIZE < numel
    elif BUCKET == WHOLE or BUCKET % (ROWS * SIZE) == 0:
        # All rows are of one bucket.
        index = first + tl.zeros([1, 1, 1], tl.int64)
        if BUCKET != WHOLE:
            index += start.to(tl.uint32) // BUCKET
        exists = index >= 0
    else:
        # A segment has less than 2^31 elements, so that 32 bits are enough to divide.
        index = first + ((start.to(tl.uint32) + offset.to(tl.uint32)) // BUCKET).to(tl.int64)
        exists = inside
    return segment, start, pointer, numel, offset, inside, index, exists


@triton.jit
def _load_numbers(
    payload,
    index,
    exists,
    NUMBERS: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The numbers of buckets: two, one twice, or ones; they broadcast to the shape of `by_row`."""
    if NUMBERS == 0:
        first = tl.full([1, 1, 1], 1.0, tl.float32)
    else:
        first = load_floats(payload, NUMBERS * index, exists, ALIGNED)
    if NUMBERS == 2:
        second = load_floats(payload, 2 * index + 1, exists, ALIGNED)
    else:
        second = first
    if NUMBERS > 0 and index.numel == ROWS * WIDTH:
        first = by_row(first, WIDTH, ROWS)
        second = by_row(second, WIDTH, ROWS)
    return first, second


@triton.jit
def _first_code(rows, num_segments, segment, start, BITS: tl.constexpr):
    """The offset of a tile's first code, in bytes."""
    # A tile starts at a multiple of 8 elements, so its codes start at a whole byte.
    return tl.load(rows + 5 * num_segments + segment) + start * BITS // 8


@triton.jit
def _bytes_of(numel, BITS: tl.constexpr, VECTOR: tl.constexpr):
    """Bytes of the codes of `numel` elements."""
    if BITS % 8 == 0:
        nbytes = numel * (BITS // 8)
    elif VECTOR >= 128:
        nbytes = numel // 8 * BITS  # a multiple of 4, which the compiler sees
    else:
        nbytes = (numel * BITS + 7) // 8
    return nbytes


@triton.jit(do_not_specialize=["num_segments"])
def _encode(
    rows,
    key_table,
    level_table,
    payload,
    num_segments,
    RULE: tl.constexpr,
    PARAMETERS: tl.constexpr,
    NUMBERS: tl.constexpr,
    NORM: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    BITS: tl.constexpr,
    BUCKET: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ALIGNED: tl.constexpr,
    VECTOR: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Find or load the numbers of buckets, round, pack, and write the residual in one pass."""
    tile = _find_tile(rows, num_segments, BUCKET, VECTOR, SIZE, WIDTH, ROWS)
    segment, start, pointer, numel, offset, inside, index, exists = tile
    x = by_row(tl.load(pointer + offset, mask=inside, other=0.0), WIDTH, ROWS)
    if NORM == "":
        first, second = _load_numbers(payload, index, exists, NUMBERS, ALIGNED, WIDTH, ROWS)
    else:
        if NORM == "l2":
            scale = scale_of_sums(sums_of_squares(pointer, numel, SIZE, WIDTH, ROWS), LEAST, MOST)
        else:
            scale = scale_of_magnitude(tl.max(tl.max(magnitude(x), axis=0), axis=1), LEAST, MOST)
        first = scale[None, :, None]
        second = first
        store_floats(payload, index, first, exists, ALIGNED)
    if key_table is None:
        u = tl.zeros([1, 1, 1], tl.float32)
    else:
        u = by_row(uniform(tl.load(key_table + segment), position_of(start, offset)), WIDTH, ROWS)
    codes, values = RULE(x, first, second, u, level_table, PARAMETERS)
    lost = flat(x - values, WIDTH, ROWS)
    address = payload + _first_code(rows, num_segments, segment, start, BITS)
    nbytes = _bytes_of(numel, BITS, VECTOR)
    WORDS: tl.constexpr = ALIGNED and VECTOR >= 128 and ROWS * SIZE * BITS % 32 == 0
    if WORDS and BITS >= 4:
        # Wider stores than the codes of a thread's four elements would move codes between threads. This is said where the
        # address is made: of a parameter, the compiler would forget it.
        address = tl.multiple_of(address, 4 if BITS >= 8 else 2)
    # Zeros, because the bits after a segment's last code must be zero.
    codes = tl.where(inside, flat(codes, WIDTH, ROWS), 0)
    store_codes(address, codes, nbytes, WORDS, BITS, SIZE, WIDTH, ROWS)
    if RESIDUAL:
        store_residual(rows, num_segments, segment, start + offset, inside, lost, VECTOR)


@triton.jit(do_not_specialize=["num_segments", "num_payloads"])
def _decode(
    rows,
    payloads,
    level_table,
    flag,
    num_segments,
    num_payloads,
    weight,
    RULE: tl.constexpr,
    PARAMETERS: tl.constexpr,
    NUMBERS: tl.constexpr,
    KEEPS_SIGN: tl.constexpr,
    BITS: tl.constexpr,
    BUCKET: tl.constexpr,
    ADD: tl.constexpr,
    ALIGNED: tl.constexpr,
    VECTOR: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Add the first payload to a tile, or overwrite it with the sum of all payloads in their order."""
    tile = _find_tile(rows, num_segments, BUCKET, VECTOR, SIZE, WIDTH, ROWS)
    segment, start, pointer, numel, offset, inside, index, exists = tile
    first_byte = _first_code(rows, num_segments, segment, start, BITS)
    nbytes = _bytes_of(numel, BITS, VECTOR)
    WORDS: tl.constexpr = ALIGNED and VECTOR >= 128 and ROWS * SIZE * BITS % 32 == 0
    total = load_total(pointer + offset, inside, ADD)
    if KEEPS_SIGN and not ADD:
        total = negated(total)  # -0 + x is x; 0 + -0 would lose the sign
    for i in range(1 if ADD else num_payloads):
        payload = tl.load(payloads + i).to(tl.pointer_type(tl.uint8))
        codes = by_row(load_codes(payload + first_byte, nbytes, WORDS, BITS, SIZE, WIDTH, ROWS), WIDTH, ROWS)
        first, second = _load_numbers(payload, index, exists, NUMBERS, ALIGNED, WIDTH, ROWS)
        total += flat(RULE(codes, first, second, weight, level_table, PARAMETERS), WIDTH, ROWS)
    store_total(pointer + offset, inside, total, flag, ADD)
