"""Quantization in Triton writes the reference's bytes, residuals and sums."""

from __future__ import annotations

import pytest
import torch
from helpers.backends import clones
from helpers.on_triton import DEVICE, assert_triton_agrees, gaussian, hard_segments, payload_of

from thinwire import kernels
from thinwire.kernels.quantize import Quantizer, Quantizers

CASES = [(4, 14, 512, "max"), (3, 7, 77, "l2"), (8, 255, 1000, "max"), (1, 1, 8, "max"), (11, 2047, 3000, "l2"),
         (16, 65535, 5000, "max")]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_quantize(case):
    quantizer, xs = Quantizer(*case), hard_segments()
    numels = [x.numel() for x in xs]
    offset = quantizer.bits % 4  # payloads begin at any address

    def compute():
        work = clones(xs)
        residuals = work if quantizer.bits % 2 else clones(xs)  # in place, or not
        payload = payload_of(quantizer.nbytes(numels), offset)
        keys = [2**64 - 5 + i if i < 5 else i for i in range(len(xs))]
        kernels.quantize.encode(work, payload, keys, quantizer, residuals)
        outs, sums = clones(xs), clones(xs)
        kernels.quantize.decode_add(payload, outs, -1 / 3, quantizer)
        finite = kernels.quantize.decode_sum([payload, payload], sums, 0.3, quantizer)
        return [payload, *residuals, *outs, *sums, finite]

    assert_triton_agrees(compute)


@pytest.mark.parametrize("bits", range(1, 17))
def test_codes_of_all_bits(bits):
    """Codes that begin at whole words, those of the second segment in the midst of a tile, and codes that do not."""
    quantizer = Quantizer(bits, 2**bits - 1, 1000)
    xs = [gaussian(2304), gaussian(1408, seed=1), gaussian(77, seed=2), gaussian(384, seed=3)]

    def compute():
        payload, outs, sums = payload_of(quantizer.nbytes([x.numel() for x in xs])), clones(xs), clones(xs)
        kernels.quantize.encode(xs, payload, list(range(len(xs))), quantizer)
        kernels.quantize.decode_add(payload, outs, -1 / 3, quantizer)
        return [payload, *outs, kernels.quantize.decode_sum([payload, payload], sums, 0.3, quantizer), *sums]

    assert_triton_agrees(compute)


@pytest.mark.parametrize("bucket_size", [10240, 10248])  # each tile has one scale, or each element loads its own
def test_a_bucket_of_several_tiles(bucket_size):
    quantizer, xs = Quantizer(4, 15, bucket_size), [gaussian(25_000)]

    def compute():
        payload, sums = payload_of(quantizer.nbytes([25_000])), clones(xs)
        kernels.quantize.encode(xs, payload, [7], quantizer)
        return [payload, kernels.quantize.decode_sum([payload, payload], sums, 1.0, quantizer), *sums]

    assert_triton_agrees(compute)


def test_a_quantizer_for_each_segment():
    xs = hard_segments()
    numels = [x.numel() for x in xs]
    quantizers = Quantizers.of([Quantizer(*CASES[i % 3]) for i in range(len(xs))])

    def compute():
        payload, residuals, outs, sums = payload_of(quantizers.nbytes(numels)), clones(xs), clones(xs), clones(xs)
        kernels.quantize.encode(xs, payload, list(range(len(xs))), quantizers, residuals)
        kernels.quantize.decode_add(payload, outs, -1 / 3, quantizers)
        finite = kernels.quantize.decode_sum([payload, payload], sums, 0.3, quantizers)
        return [payload, *residuals, *outs, *sums, finite]

    assert_triton_agrees(compute)


@pytest.mark.parametrize("bucket_size", [8, 3000])  # within a tile, and of several
def test_one_step_that_overflows(bucket_size):
    """Scales above 0x1.fffp126 are infinite, and codes zero."""
    quantizer = Quantizer(1, 1, bucket_size)
    xs = [x * 3e38 / x.abs().max() for x in hard_segments()[:1]] + [torch.full((100,), 1.6e38, device=DEVICE)]

    def compute():
        payload, residuals = payload_of(quantizer.nbytes([x.numel() for x in xs])), clones(xs)
        kernels.quantize.encode(xs, payload, [7, 8], quantizer, residuals)
        return [payload, *residuals]

    assert_triton_agrees(compute)


def test_no_residual_and_one_payload():
    quantizer, xs = Quantizer(4, 15, 512), hard_segments()[:1]

    def compute():
        payload = payload_of(quantizer.nbytes([2500]))
        kernels.quantize.encode(xs, payload, [7], quantizer)
        sums = clones(xs)
        return [payload, kernels.quantize.decode_sum([payload], sums, 1.0, quantizer), *sums]

    assert_triton_agrees(compute)
