"""Signs, means, ternary values and shorter floats in Triton: the reference's bytes, residuals and sums."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from helpers.backends import clones
from helpers.on_triton import DEVICE, assert_triton_agrees, gaussian, hard_segments, payload_of

from thinwire import kernels
from thinwire.kernels.scales import _halve
from thinwire.kernels.ternary import Ternary
from thinwire.kernels.triton.block_sums import fold, total_of
from thinwire.kernels.triton.launch import launch


def segments() -> list[torch.Tensor]:
    """Hard segments without the largest."""
    return hard_segments()[1:]


def check(family: Any, nbytes: int, encode: Callable[..., None], arguments: tuple[Any, ...], offset: int) -> None:
    """Encode in place or not, at any address; decode, and sum two payloads."""
    xs = segments()

    def compute():
        work = clones(xs)
        residuals = work if offset % 2 else clones(xs)
        payload = payload_of(nbytes, offset)
        encode(work, payload, residuals)
        outs, sums = clones(xs), clones(xs)
        family.decode_add(payload, outs, -1 / 3, *arguments)
        other = payload_of(nbytes)
        encode([x.flip(0) for x in xs], other, None)
        finite = family.decode_sum([payload, other], sums, 0.3, *arguments)
        return [payload, other, *residuals, *outs, *sums, finite]

    assert_triton_agrees(compute)


NUMELS = [x.numel() for x in segments()]


@pytest.mark.parametrize("fixed_scale", [None, 0.7])
def test_sign(fixed_scale):
    def encode(xs, payload, residuals):
        kernels.sign.encode(xs, payload, residuals, fixed_scale)

    check(kernels.sign, kernels.sign.nbytes(NUMELS), encode, (), offset=1 if fixed_scale else 0)


@pytest.mark.parametrize("bucket_size", [None, 300])
def test_onebit(bucket_size):
    def encode(xs, payload, residuals):
        kernels.onebit.encode(xs, payload, bucket_size, residuals)

    nbytes = kernels.onebit.nbytes(NUMELS, bucket_size)
    check(kernels.onebit, nbytes, encode, (bucket_size,), offset=(bucket_size or 0) % 4)


@pytest.mark.parametrize("dtype", kernels.cast.WIDTHS)
def test_cast(dtype):
    def encode(xs, payload, residuals):
        kernels.cast.encode(xs, payload, dtype, residuals)

    check(kernels.cast, kernels.cast.nbytes(NUMELS, dtype), encode, (dtype,), offset=len(dtype) % 4)


@pytest.mark.parametrize("dtype", kernels.cast.WIDTHS)
def test_every_code_of_a_shorter_float_is_widened(dtype):
    bits = 8 * kernels.cast.WIDTHS[dtype]
    codes = torch.arange(2**bits, device=DEVICE).to(torch.uint8 if bits == 8 else torch.int16).view(torch.uint8)
    scale = torch.ones(1 if bits == 8 else 0, device=DEVICE).view(torch.uint8)
    outs = [torch.zeros(2**bits, device=DEVICE)]

    def compute():
        kernels.cast.decode_sum([torch.cat([scale, codes])], outs, 1.0, dtype)
        return clones(outs)

    assert_triton_agrees(compute)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float16"])
def test_a_shorter_float_rounds_to_nearest_even(dtype):
    """All halves between two codes, and their neighbours; the largest number sets a scale of 1."""
    codes = torch.arange(2**7 if dtype != "float16" else 2**10).to(torch.int16)
    width = torch.uint8 if dtype != "float16" else torch.int16
    x = codes.to(width).view(getattr(torch, dtype)).float()
    x = torch.cat([x[x.isfinite()], torch.tensor([torch.finfo(getattr(torch, dtype)).max])])
    halves = (x[1:] + x[:-1]) / 2
    x = torch.cat([x, halves, halves.nextafter(torch.tensor(0.0)), -halves.nextafter(torch.tensor(9e9)), x / 2]).to(
        DEVICE
    )

    def compute():
        payload = payload_of(kernels.cast.nbytes([x.numel()], dtype))
        kernels.cast.encode([x], payload, dtype)
        return [payload]

    assert_triton_agrees(compute)


@pytest.mark.parametrize(
    ("ternary", "clip"),
    [(Ternary(), 2.5), (Ternary(17, 300), float("inf")), (Ternary(2**20 + 1), 1e38)],
    ids=str,
)
def test_ternary(ternary, clip):
    xs = [*segments(), torch.full((40,), 3.0, device=DEVICE)]
    numels = [x.numel() for x in xs]
    offset = ternary.base % 4

    def compute():
        work = clones(xs)
        residuals = work if offset == 1 else clones(xs)
        scales = kernels.ternary.scales(xs, clip, ternary.bucket_size)
        payloads = [payload_of(ternary.nbytes(numels), offset) for _ in range(2)]
        keys = [2**64 - 5 + i if i < 5 else i for i in range(len(xs))]
        kernels.ternary.encode(work, scales, payloads[0], keys, ternary, residuals)
        kernels.ternary.encode(xs, scales, payloads[1], keys[::-1], ternary)
        outs, sums, corrupt = clones(xs), clones(xs), clones(xs)
        kernels.ternary.decode_add(payloads[0], scales, outs, -1 / 3, ternary)
        finite = kernels.ternary.decode_sum(payloads, [scales, scales * 0.5], sums, 0.3, ternary)
        kernels.ternary.decode_add(payload_of(ternary.nbytes(numels)), scales, corrupt, 1.0, ternary)
        return [scales, *payloads, *residuals, *outs, *sums, *corrupt, finite]

    assert_triton_agrees(compute)


@triton.jit
def _total_of(sums, out, count, MAX: tl.constexpr):
    tl.store(out, total_of(sums, count, MAX))


def test_sums_of_blocks_are_halved_as_in_the_reference():
    counts = [1000, 1025, 20_000, 1, 2000]
    first = [sum(counts[:i]) for i in range(len(counts))]
    sums = gaussian(sum(counts)).double() * math.pi
    for largest in (False, True):
        work, out = sums.clone(), torch.empty(1, dtype=torch.float64, device=DEVICE)
        fold(work[None], first, counts, largest)
        for i, count in enumerate(counts):
            launch(_total_of, 1, DEVICE, work[first[i] :], out, count, MAX=largest)
            padded = torch.nn.functional.pad(sums[first[i] :][:count], (0, 2**16 - count))
            assert out[0] == (padded.clamp(min=0).max() if largest else _halve(padded))


def test_minus_zero_keeps_its_sign():
    """In what a cast loses, and in the value of a negative element whose scale is zero."""
    xs = [torch.tensor([-0.0, -1e-45, 0.0, 0.0], device=DEVICE)]

    def compute():
        made = []
        for dtype in kernels.cast.WIDTHS:
            residual = clones(xs)
            kernels.cast.encode(xs, payload_of(kernels.cast.nbytes([4], dtype)), dtype, residual)
            made += residual
        payload, outs = payload_of(kernels.sign.nbytes([4])), [torch.full((4,), -0.0, device=DEVICE)]
        kernels.sign.encode(xs, payload)
        kernels.sign.decode_add(payload, outs, 1.0)
        return [*made, *outs]

    assert_triton_agrees(compute)
