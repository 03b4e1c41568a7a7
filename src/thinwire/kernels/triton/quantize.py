"""Quantization to evenly spaced levels in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import quantize as family
from ..flags import Flag, flag_of
from ..quantize import Quantizer
from ..random import keys_on
from ..scales import MIN_SCALE, MIN_SCALE_WIDE
from .buckets import DECODER, ENCODER, decoder_rows, encoder_rows, find_codes, load_buckets, store_buckets
from .device import is_finite, load_codes, load_floats, position_of, uniform
from .launch import are_aligned, launch, pointers, table
from .tiles import Tiles
from .variants import Variant, add_variant

__all__ = ["encode", "decode_add", "decode_sum"]


def encode(
    xs: list[Tensor], out: Tensor, keys: list[int], quantizer: Quantizer, residuals: list[Tensor] | None
) -> None:
    tiles = Tiles.of_buckets(quantizer.bucket_size)
    if tiles is None:
        return family._encode.reference(xs, out, keys, quantizer, residuals)
    device = out.device
    rows, num_tiles = encoder_rows(xs, residuals, device, tiles, quantizer.bits, quantizer.bucket_size)
    launch(
        _encode_buckets,
        num_tiles,
        device,
        *(rows, keys_on(keys, device), out, len(xs)),
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


def decode_sum(payloads: list[Tensor], outs: list[Tensor], weight: float, quantizer: Quantizer) -> Flag:
    return flag_of(_decode_payloads(payloads, outs, weight, quantizer, add=False)[0] == 0)


def _decode_payloads(
    payloads: list[Tensor], outs: list[Tensor], weight: float, quantizer: Quantizer, add: bool
) -> Tensor:
    """Add one payload, or overwrite with the sum of several; an int32 on the device, 1 where a sum is not finite."""
    device = payloads[0].device
    flag = torch.empty(1, dtype=torch.int32, device=device)
    if not add:
        flag.zero_()
    tiles = Tiles.of_elements(quantizer.bucket_size)
    rows, num_tiles = decoder_rows(outs, device, tiles, quantizer.bits, quantizer.bucket_size)
    launch(
        _decode,
        num_tiles,
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
    segment, start, numel, offset, inside, x, scale = load_buckets(
        rows, payload, num_segments, LEAST, L2, ALIGNED, SIZE, WIDTH, ROWS
    )
    u = uniform(tl.load(key_table + segment), position_of(start, offset))
    codes, value = quantize(x, scale, u, STEPS)
    lost = x - value
    store_buckets(
        rows,
        payload,
        num_segments,
        segment,
        start,
        numel,
        offset,
        inside,
        codes,
        lost,
        BITS,
        RESIDUAL,
        SIZE,
        WIDTH,
        ROWS,
    )


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
    out_ptr, numel, offset, inside, scale_index, has_scale, first_byte = find_codes(
        rows, num_segments, BITS, BUCKET, SIZE, WIDTH, ROWS
    )
    nbytes = (numel * BITS + 7) // 8

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
