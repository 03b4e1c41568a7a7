"""Sums and maxima over buckets of any size, up to a whole segment, in two launches.

The first launch reduces each block of 1024 elements of a bucket to float64 numbers, in the order of
`kernels.scales.tree_sum`. In the second, a family's kernel has one program per bucket, which adds up the blocks with
`total_of` in the same order and stores the bucket's scale. A maximum of magnitudes is one of their bits, as a number.

Buckets of more than 1024 blocks, a million elements, take up to three launches in between. Each adds the sixteen parts of
a bucket's numbers and keeps the sums in the first part.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..checks import MAX_SEGMENT_NUMEL, numels_of
from ..scales import SUM_BLOCK
from .device import (
    find,
    find_segment,
    halve,
    load_pointer,
    load_size,
    magnitude,
    one_nan,
    scale_of_magnitude,
    scale_of_sums,
    store_floats,
)
from .launch import Launch, are_aligned, kept, launch, launch_each, plan_launches, pointers, starts, table, tiles_of
from .payloads import WHOLE

# Kinds of reductions, and how many numbers each gives.
KINDS = {"max": 1, "squares": 1, "magnitudes": 1, "halves": 3, "moments": 2}
PROGRAM_BLOCKS = 16
FOLDED = tl.constexpr(1024)  # numbers of a bucket that one program adds up
BUCKET_NUMEL = 1024 * SUM_BLOCK  # elements of a bucket that a program reads without a loop
PARTS, COLUMNS = tl.constexpr(16), tl.constexpr(64)


@dataclass(frozen=True)
class BlockSums:
    """The reduced blocks of all segments.

    Args:
        rows: a table with one column per segment: first tile, address, size, first block, first bucket.
        sums: (numbers, blocks) of float64; folded, so that `total_of` can add them up.
        num_blocks: of all segments.
        num_buckets: of all segments.
    """

    rows: Tensor
    sums: Tensor
    num_blocks: int
    num_buckets: int


def block_sums(
    xs: list[Tensor], device: torch.device, kind: str, bucket_size: int = MAX_SEGMENT_NUMEL, least_buckets: int = 0
) -> BlockSums:
    """Reduce the blocks of all buckets.

    Args:
        xs: the segments.
        device: theirs.
        kind: one of `KINDS`: the largest magnitude; the sum of squares; of magnitudes; of the negative elements, of the
            others, and the number of negative elements; of the differences to the first element, and of their squares.
        bucket_size: elements of a bucket; by default, each segment is one.
        least_buckets: the number of buckets of an empty segment.
    """
    numels = tuple(numels_of(xs))
    launches, num_blocks, num_buckets = _plan(device, numels, pointers(xs), bucket_size, least_buckets)
    sums = torch.empty(KINDS[kind], num_blocks, dtype=torch.float64, device=device)
    constants = {"KIND": kind, "BUCKET": bucket_size, **_block_constants(bucket_size)}
    launch_each(_reduce_blocks, launches, device, sums, len(xs), num_blocks, **constants)
    if min(bucket_size, max(numels, default=0)) > BUCKET_NUMEL:
        fold(sums, *_blocks_of_buckets(numels, bucket_size), kind == "max")
    # Any launch's table serves: they differ in the row of first tiles, which later kernels do not read.
    return BlockSums(launches[0].rows, sums, num_blocks, num_buckets)


@kept
def _plan(
    device: torch.device, numels: tuple[int, ...], addresses: tuple[int, ...], bucket_size: int, least_buckets: int
) -> tuple[list[Launch], int, int]:
    """The launches that reduce blocks, and the numbers of blocks and of buckets."""
    in_bucket = -(-bucket_size // SUM_BLOCK)
    blocks = [n // bucket_size * in_bucket + -(-(n % bucket_size) // SUM_BLOCK) for n in numels]
    buckets = [max(least_buckets, count) for count in tiles_of(numels, bucket_size)]
    tiles = tiles_of(blocks, PROGRAM_BLOCKS)
    rows = [addresses, numels, starts(blocks)[:-1], starts(buckets)[:-1]]
    return plan_launches(device, rows, tiles, numels, addresses), sum(blocks), sum(buckets)


@lru_cache(maxsize=256)
def _blocks_of_buckets(numels: tuple[int, ...], bucket_size: int) -> tuple[list[int], list[int]]:
    """The first block of each bucket, and how many it has."""
    counts: list[int] = []
    for n in numels:
        whole, rest = divmod(n, bucket_size)
        counts += [-(-size // SUM_BLOCK) for size in [bucket_size] * whole + [rest] * (rest > 0)]
    return starts(counts)[:-1], counts


def fold(sums: Tensor, first_blocks: list[int], counts: list[int], largest: bool) -> None:
    """Reduce the numbers of each bucket to at most 1024, in place.

    Args:
        sums: (numbers, blocks) of float64.
        first_blocks: of each bucket.
        counts: blocks of each bucket.
        largest: whether to keep maxima, not sums.
    """
    left = [(first, count, 1 << (count - 1).bit_length()) for first, count in zip(first_blocks, counts, strict=True)]
    while left := [item for item in left if item[2] > FOLDED.value]:
        first_program = starts([size // (PARTS.value * COLUMNS.value) for _, _, size in left])
        rows = table(sums.device, first_program[:-1], *zip(*left, strict=True))
        for numbers in sums:
            launch(_fold, first_program[-1], sums.device, rows, numbers, len(left), MAX=largest)
        left = [(first, size // PARTS.value, size // PARTS.value) for first, _, size in left]


def store_numbers(
    xs: list[Tensor],
    out: Tensor,
    kind: str,
    rule: Any,
    parameters: tuple[float, ...],
    bucket_size: int = MAX_SEGMENT_NUMEL,
    least_buckets: int = 0,
    argument: float = 0.0,
) -> None:
    """Reduce all buckets, and store one or two numbers of each at the start of a payload.

    Args:
        xs: the segments.
        out: the payload.
        kind: as in `block_sums`; "halves" gives two numbers of each bucket.
        rule: the `triton.jit` function `(first, second, third, size, argument, PARAMETERS)` that gives two float32 numbers,
            the second of use for "halves" alone. It gets the bucket's sums and its number of elements.
        parameters: constants of the rule.
        bucket_size: elements of a bucket; by default, each segment is one.
        least_buckets: the number of buckets of an empty segment.
        argument: of the rule.
    """
    blocks = block_sums(xs, out.device, kind, bucket_size, least_buckets)
    arguments = (blocks.rows, blocks.sums, out, len(xs), blocks.num_blocks, argument)
    constants = {"KIND": kind, "RULE": rule, "PARAMETERS": parameters, "BUCKET": bucket_size}
    launch(_store_numbers, blocks.num_buckets, out.device, *arguments, ALIGNED=are_aligned(out), **constants)


def store_scales(xs: list[Tensor], out: Tensor, bucket_size: int, norm: str, least: float, most: float) -> None:
    """Store the scale of each bucket, as quantizers do, at the start of a payload."""
    kind, rule = SCALES[norm]
    store_numbers(xs, out, kind, rule, (least, most), bucket_size)


def _block_constants(bucket_size: int) -> dict[str, int]:
    """A program's blocks, and the 32-element steps of each."""
    # A short bucket fills only part of a block: the steps left out would add zeros.
    return {"STEPS": min(SUM_BLOCK, 1 << (bucket_size - 1).bit_length()) // 32 or 1, "BLOCKS": PROGRAM_BLOCKS}


@triton.jit(do_not_specialize=["num_segments", "num_blocks"])
def _reduce_blocks(
    rows,
    sums,
    num_segments,
    num_blocks,
    KIND: tl.constexpr,
    BUCKET: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCKS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Each row is a block; element i of it is added to lane `i mod 32`."""
    segment, tile = find_segment(rows, num_segments)
    x = load_pointer(rows + num_segments + segment, VECTOR)
    numel = load_size(rows + 2 * num_segments + segment, VECTOR)
    first_block = tl.load(rows + 3 * num_segments + segment)
    block = tile * BLOCKS + tl.arange(0, BLOCKS)
    if BUCKET == WHOLE:
        in_bucket = block * 1024
        start = in_bucket
    else:
        IN_BUCKET: tl.constexpr = (BUCKET + 1023) // 1024
        bucket = block // IN_BUCKET
        in_bucket = (block - bucket * IN_BUCKET) * 1024
        start = bucket * BUCKET + in_bucket
    size = tl.minimum(tl.minimum(BUCKET - in_bucket, 1024), numel - start).to(tl.int32)
    if VECTOR > 1 and (BUCKET == WHOLE or BUCKET % 4 == 0):
        size = tl.multiple_of(size, 4)  # a mask that may end anywhere prevents loads of 16 bytes
    size = size[:, None]
    row = (x + start)[:, None]
    lane = tl.arange(0, 32)[None, :]
    out = sums + first_block + block
    stored = start < numel
    if KIND == "max":
        largest = tl.zeros((BLOCKS, 32), tl.int32)
        for i in range(STEPS):
            at = 32 * i + lane
            value = tl.load(row + at, mask=at < size, other=0.0)
            largest = tl.maximum(largest, magnitude(value))
        tl.store(out, tl.max(largest, axis=1).to(tl.float64), mask=stored)
    elif KIND == "squares" or KIND == "magnitudes":
        total = tl.zeros((BLOCKS, 32), tl.float64)
        for i in range(STEPS):
            at = 32 * i + lane
            value = tl.load(row + at, mask=at < size, other=0.0).to(tl.float64)
            if KIND == "squares":
                total += value * value
            else:
                total += tl.abs(value)
        tl.store(out, halve(total, BLOCKS, 32), mask=stored)
    else:
        first = tl.zeros((BLOCKS, 32), tl.float64)
        second = tl.zeros((BLOCKS, 32), tl.float64)
        negatives = tl.zeros((BLOCKS, 32), tl.int32)
        if KIND == "moments":
            shift = tl.load(x).to(tl.float64)
        for i in range(STEPS):
            at = 32 * i + lane
            inside = at < size
            value = tl.load(row + at, mask=inside, other=0.0).to(tl.float64)
            if KIND == "moments":
                # Masked elements load as 0, and would count as -shift.
                shifted = tl.where(inside, value - shift, 0.0)
                first += shifted
                second += shifted * shifted
            else:
                first += tl.where(value < 0, value, 0.0)
                second += tl.where(value < 0, 0.0, value)
                negatives += (value < 0).to(tl.int32)
        tl.store(out, halve(first, BLOCKS, 32), mask=stored)
        tl.store(out + num_blocks, halve(second, BLOCKS, 32), mask=stored)
        if KIND == "halves":
            tl.store(out + 2 * num_blocks, tl.sum(negatives, axis=1).to(tl.float64), mask=stored)


@triton.jit
def find_bucket(rows, num_segments, BUCKET: tl.constexpr):
    """The segment of a program's bucket, the bucket's size, its first block, and the number of its blocks."""
    first_bucket = rows + 4 * num_segments
    program = tl.program_id(0)
    segment = find(first_bucket, num_segments, program)
    bucket = program - tl.load(first_bucket + segment)
    size = tl.minimum(tl.load(rows + 2 * num_segments + segment) - bucket * BUCKET, BUCKET)
    first_block = tl.load(rows + 3 * num_segments + segment) + bucket * ((BUCKET + 1023) // 1024)
    return segment, size, first_block, (size + 1023) // 1024


@triton.jit(do_not_specialize=["num_buckets"])
def _fold(rows, sums, num_buckets, MAX: tl.constexpr):
    """Add the parts of a run of columns, which no other program reads or writes."""
    bucket, run = find_segment(rows, num_buckets)
    sums += tl.load(rows + num_buckets + bucket)
    count = tl.load(rows + 2 * num_buckets + bucket)
    width = tl.load(rows + 3 * num_buckets + bucket) // PARTS
    column = run * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.arange(0, PARTS)[:, None] * width + column[None, :]
    parts = tl.load(sums + at, mask=at < count, other=0.0)
    if MAX:
        folded = tl.max(parts, axis=0)
    else:
        folded = halve(tl.reshape(parts, (1, PARTS * COLUMNS)), 1, PARTS * COLUMNS, COLUMNS)
    tl.debug_barrier()  # all threads have read the first part before any writes
    tl.store(sums + column, folded)


@triton.jit
def total_of(sums, count, MAX: tl.constexpr):
    """The sum, or the maximum, of a bucket's numbers, padded with zeros to a power of two and halved.

    Args:
        sums: pointer to the first.
        count: how many there were before `fold`.
    """
    size = tl.full([], FOLDED, tl.int64)
    count += tl.zeros([], tl.int64)  # of the type of `size`, which it may become
    while size < count:
        size *= 2
    if size > FOLDED:
        while size > FOLDED:
            size = size // PARTS
        count = size  # `fold` has written all of these, with zeros for what was padded
    at = tl.arange(0, FOLDED)
    part = tl.load(sums + at, mask=at < count, other=0.0)
    if MAX:
        total = tl.max(part, axis=0)
    else:
        total = tl.sum(halve(tl.reshape(part, (1, FOLDED)), 1, FOLDED), axis=0)  # of one number
    return total


@triton.jit(do_not_specialize=["num_segments", "num_blocks"])
def _store_numbers(
    rows,
    sums,
    payload,
    num_segments,
    num_blocks,
    argument,
    KIND: tl.constexpr,
    RULE: tl.constexpr,
    PARAMETERS: tl.constexpr,
    BUCKET: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One program per bucket."""
    _, size, first_block, count = find_bucket(rows, num_segments, BUCKET)
    program = tl.program_id(0)
    sums += first_block
    first = total_of(sums, count, KIND == "max")
    if KIND == "halves":
        second = total_of(sums + num_blocks, count, False)
        third = total_of(sums + 2 * num_blocks, count, False)
        low, high = RULE(first, second, third, size, argument, PARAMETERS)
        store_floats(payload, 2 * program, one_nan(low), True, ALIGNED)
        store_floats(payload, 2 * program + 1, one_nan(high), True, ALIGNED)
    else:
        number, _ = RULE(first, first, first, size, argument, PARAMETERS)
        store_floats(payload, program, one_nan(number), True, ALIGNED)


@triton.jit
def _largest(largest, _second, _third, _size, _argument, PARAMETERS: tl.constexpr):
    scale = scale_of_magnitude(largest.to(tl.int32), PARAMETERS[0], PARAMETERS[1])
    return scale, scale


@triton.jit
def _root(squares, _second, _third, _size, _argument, PARAMETERS: tl.constexpr):
    scale = scale_of_sums(squares, PARAMETERS[0], PARAMETERS[1])
    return scale, scale


SCALES = {"max": ("max", _largest), "l2": ("squares", _root)}  # by norm: what is reduced, and the rule
