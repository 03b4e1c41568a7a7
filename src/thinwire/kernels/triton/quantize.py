"""Quantization to evenly spaced levels in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import quantize as family
from ..checks import numels_of
from ..quantize import Quantizer
from ..scales import MIN_SCALE, MIN_SCALE_WIDE
from .device import (
    find,
    is_finite,
    load_codes,
    load_floats,
    magnitude,
    scale_of_magnitude,
    scale_of_sums,
    store_codes,
    store_floats,
    sums_of_squares,
    tile_offsets,
    uniform,
)
from .launch import are_aligned, keys_table, launch, pointers, starts, table
from .tiles import Tiles
from .variants import Variant, add_variant

__all__ = ["encode", "decode_add", "decode_sum"]


def encode(
    xs: list[Tensor], out: Tensor, keys: list[int], quantizer: Quantizer, residuals: list[Tensor] | None
) -> None:
    tiles = Tiles.of_buckets(quantizer.bucket_size)
    if tiles is None:
        return family._encode.reference(xs, out, keys, quantizer, residuals)
    numels, device = numels_of(xs), out.device
    first_tile = starts([tiles.count(n) for n in numels])
    scales, codes = sections(numels, quantizer.bits, quantizer.bucket_size)
    rows = table(device, pointers(xs), pointers(residuals, len(xs)), numels, first_tile[:-1], scales, codes)
    launch(
        _encode_buckets,
        first_tile[-1],
        device,
        *(rows, keys_table(device, keys), out, len(xs)),
        BITS=quantizer.bits,
        STEPS=quantizer.num_steps,
        LEAST=MIN_SCALE_WIDE if quantizer.num_steps > 255 else MIN_SCALE,
        L2=quantizer.norm == "l2",
        RESIDUAL=residuals is not None,
        ALIGNED=are_aligned(out),
        **tiles.constants,
    )


def decode_add(payload: Tensor, outs: list[Tensor], weight: float, quantizer: Quantizer) -> None:
    _decode_payloads([payload], outs, weight, quantizer, add=True)


def decode_sum(payloads: list[Tensor], outs: list[Tensor], weight: float, quantizer: Quantizer) -> bool:
    return not bool(_decode_payloads(payloads, outs, weight, quantizer, add=False))


def sections(numels: list[int], bits: int, bucket_size: int) -> tuple[list[int], list[int]]:
    """Of each segment in a payload: the index of its first scale, and the offset of its codes in bytes."""
    scales = starts([-(-n // bucket_size) for n in numels])
    return scales[:-1], starts([(n * bits + 7) // 8 for n in numels], offset=4 * scales[-1])[:-1]


def _decode_payloads(
    payloads: list[Tensor], outs: list[Tensor], weight: float, quantizer: Quantizer, add: bool
) -> Tensor:
    """Add one payload, or overwrite with the sum of several; an int32 on the device, 1 where a sum is not finite."""
    device, numels = payloads[0].device, numels_of(outs)
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    tiles = Tiles.of_elements(quantizer.bucket_size)
    first_tile = starts([tiles.count(n) for n in numels])
    rows = table(
        device, pointers(outs), numels, first_tile[:-1], *sections(numels, quantizer.bits, quantizer.bucket_size)
    )
    launch(
        _decode,
        first_tile[-1],
        device,
        *(rows, table(device, pointers(payloads)), flag, len(outs), len(payloads), weight),
        BITS=quantizer.bits,
        STEPS=quantizer.num_steps,
        BUCKET=quantizer.bucket_size,
        ADD=add,
        ALIGNED=are_aligned(*payloads),
        **tiles.constants,
    )
    return flag


@triton.jit(do_not_specialize=["num_segments"])
def _encode_buckets(
    rows,
    key_table,
    payload,
    num_segments,
    BITS: tl.constexpr,
    STEPS: tl.constexpr,
    LEAST: tl.constexpr,
    L2: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ALIGNED: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Each row of a tile is a bucket: find its scale, quantize, pack, and write the residual in one pass."""
    tile = tl.program_id(0)
    segment = find(rows + 3 * num_segments, num_segments, tile)
    first_row = (tile - tl.load(rows + 3 * num_segments + segment)) * ROWS
    start = first_row * SIZE
    x_ptr = tl.load(rows + segment).to(tl.pointer_type(tl.float32)) + start
    numel = tl.load(rows + 2 * num_segments + segment) - start
    offset, inside = tile_offsets(SIZE, WIDTH, ROWS)
    inside = inside & (offset < numel)

    if L2:
        scale = scale_of_sums(sums_of_squares(x_ptr, numel, SIZE, WIDTH, ROWS), LEAST)
        x = tl.load(x_ptr + offset, mask=inside, other=0.0)
    else:
        x = tl.load(x_ptr + offset, mask=inside, other=0.0)
        scale = scale_of_magnitude(tl.max(magnitude(x), axis=1), LEAST)
    row = tl.arange(0, ROWS)
    scale_index = tl.load(rows + 4 * num_segments + segment) + first_row + row
    store_floats(payload, scale_index, scale, row * SIZE < numel, ALIGNED)

    key = tl.load(key_table + segment)
    codes, value = quantize(x, scale[:, None], uniform(key, start.to(tl.uint32) + offset.to(tl.uint32)), STEPS)
    codes = tl.where(inside, codes, 0)
    address = payload + tl.load(rows + 5 * num_segments + segment) + start * BITS // 8
    store_codes(address, codes, (numel * BITS + 7) // 8, BITS, SIZE, WIDTH, ROWS)
    if RESIDUAL:
        residual_ptr = tl.load(rows + num_segments + segment).to(tl.pointer_type(tl.float32)) + start
        # The residual may be the segment itself: all threads have read x before any writes.
        tl.debug_barrier()
        tl.store(residual_ptr + offset, x - value, mask=inside)


@triton.jit
def quantize(x, scale, u, STEPS: tl.constexpr):
    """Codes (int32) and values of elements; `kernels.quantize._quantize_segment`."""
    steps = tl.full(scale.shape, STEPS, tl.float32)
    usable = is_finite(scale) & (scale > 0)
    t = (x * tl.div_rn(steps, scale) + STEPS) * 0.5
    codes = tl.where(usable, t + u, 0.0).to(tl.int32)
    codes = tl.minimum(tl.maximum(codes, 0), STEPS)
    return codes, (2 * codes - STEPS).to(tl.float32) * tl.div_rn(scale, steps)


@triton.jit(do_not_specialize=["num_segments", "num_payloads"])
def _decode(
    rows,
    payloads,
    flag,
    num_segments,
    num_payloads,
    weight,
    BITS: tl.constexpr,
    STEPS: tl.constexpr,
    BUCKET: tl.constexpr,
    ADD: tl.constexpr,
    ALIGNED: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Add the first payload to a tile, or overwrite it with the sum of all payloads in their order."""
    tile = tl.program_id(0)
    segment = find(rows + 2 * num_segments, num_segments, tile)
    first_row = (tile - tl.load(rows + 2 * num_segments + segment)) * ROWS
    start = first_row * SIZE
    out_ptr = tl.load(rows + segment).to(tl.pointer_type(tl.float32)) + start
    numel = tl.load(rows + num_segments + segment) - start
    offset, inside = tile_offsets(SIZE, WIDTH, ROWS)
    inside = inside & (offset < numel)
    first_scale = tl.load(rows + 3 * num_segments + segment)
    first_byte = tl.load(rows + 4 * num_segments + segment) + start * BITS // 8
    nbytes = (numel * BITS + 7) // 8
    if SIZE == BUCKET:
        row = tl.arange(0, ROWS)[:, None]
        scale_index = first_scale + first_row + row
        has_scale = row * SIZE < numel
    else:
        scale_index = first_scale + ((start.to(tl.uint32) + offset.to(tl.uint32)) // BUCKET).to(tl.int64)
        has_scale = inside

    if ADD:
        total = tl.load(out_ptr + offset, mask=inside, other=0.0)
    else:
        total = tl.zeros((ROWS, WIDTH), tl.float32)
    for i in range(num_payloads):
        payload = tl.load(payloads + i).to(tl.pointer_type(tl.uint8))
        codes = load_codes(payload + first_byte, nbytes, BITS, SIZE, WIDTH, ROWS)
        scale = load_floats(payload, scale_index, has_scale, ALIGNED)
        step = tl.div_rn(scale, tl.full(scale.shape, STEPS, tl.float32)) * weight
        value = (2 * codes - STEPS).to(tl.float32) * step
        if ADD:
            total += value
        else:
            total = tl.where(i == 0, value, total + value)  # 0 + -0 would lose the sign
    tl.store(out_ptr + offset, total, mask=inside)
    if not ADD:
        # Every program that writes the flag writes 1, so their order does not matter.
        finite = tl.min((is_finite(total) | (inside == 0)).to(tl.int32))
        tl.store(flag, 1, mask=finite == 0)


# ---- what is compiled and counted without a GPU ----

ENCODER = {"rows": "*i64", "key_table": "*i64", "payload": "*u8", "num_segments": "i32"}
DECODER = {
    "rows": "*i64",
    "payloads": "*i64",
    "flag": "*i32",
    "num_segments": "i32",
    "num_payloads": "i32",
    "weight": "fp32",
}


def _add_variants(bits: int, bucket_size: int, norm: str, residual: bool) -> None:
    tiles, l2 = Tiles.of_elements(bucket_size), norm == "l2"
    constants = {"BITS": bits, "STEPS": 2**bits - 1, "ALIGNED": True, **tiles.constants}
    code_bytes = bits / 8 + 4 / bucket_size
    what = f"{bits} bits, buckets of {bucket_size}"
    add_variant(
        Variant(
            f"quantize.encode: {what}, {norm}{', residual' if residual else ''}",
            _encode_buckets,
            {**constants, "LEAST": MIN_SCALE, "L2": l2, "RESIDUAL": residual},
            ENCODER,
            tiles.numel,
            least_bytes=4 + code_bytes + 4 * residual,
            cached_bytes=4.0 if l2 else 0.0,
            loop_trips=min(32, tiles.width // 32),
        )
    )
    for add in (True, False) if norm == "max" and residual else ():
        add_variant(
            Variant(
                f"quantize.{'decode_add' if add else 'decode_sum, one payload'}: {what}",
                _decode,
                {**constants, "BUCKET": bucket_size, "ADD": add},
                DECODER,
                tiles.numel,
                least_bytes=4 + code_bytes + 4 * add,
            )
        )


for _bits, _bucket_size, _norm, _residual in [
    (4, 512, "max", False),
    (4, 512, "max", True),
    (4, 512, "l2", True),
    (8, 512, "max", True),
    (3, 1000, "max", True),
    (2, 2048, "l2", False),
]:
    _add_variants(_bits, _bucket_size, _norm, _residual)
