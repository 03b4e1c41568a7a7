"""The C++ backend writes the reference's bytes for every input: any sizes, any bit patterns."""

from __future__ import annotations

import doctest

import pytest
import torch
from helpers.backends import assert_backends_agree, clones, segments
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire import kernels
from thinwire.kernels import _native, layout, random


@settings(max_examples=150, deadline=None)
@given(segments(), st.data())
def test_quantize(xs, data):
    bits = data.draw(st.integers(1, 8))
    num_steps = data.draw(st.integers(1, 2**bits - 1))
    bucket_size = data.draw(st.sampled_from([1, 3, 8, 100, 512, 2048, 5000]))
    norm = data.draw(st.sampled_from(["max", "l2"]))
    keys = [data.draw(st.integers(0, 2**64 - 1)) for _ in xs]
    weight = data.draw(st.sampled_from([1.0, 0.25, -1 / 3]))
    alias = data.draw(st.booleans())

    def compute():
        work = clones(xs)
        residuals = work if alias else clones(xs)
        nbytes = kernels.quantize_nbytes([x.numel() for x in xs], bits, bucket_size)
        payload = torch.empty(nbytes, dtype=torch.uint8)
        kernels.quantize(work, payload, keys, bits, num_steps, bucket_size, norm, residuals)
        outs = clones(xs)
        kernels.dequantize_add(payload, outs, weight, bits, num_steps, bucket_size)
        return [payload, *residuals, *outs]

    assert_backends_agree(compute)


@settings(max_examples=200, deadline=None)
@given(segments(), st.sampled_from(list(kernels.CAST_WIDTHS)), st.booleans())
def test_cast(xs, dtype, alias):
    def compute():
        work = clones(xs)
        residuals = work if alias else clones(xs)
        payload = torch.empty(kernels.cast_nbytes([x.numel() for x in xs], dtype), dtype=torch.uint8)
        kernels.cast_pack(work, payload, dtype, residuals)
        outs = clones(xs)
        kernels.cast_decode_add(payload, outs, 0.3, dtype)
        return [payload, *residuals, *outs]

    assert_backends_agree(compute)


@settings(max_examples=100, deadline=None)
@given(segments(), st.data())
def test_quantized_sum(xs, data):
    """Overwrites, adds in order, and tells whether all is finite; the C++ backend in blocks, over all payloads at once."""
    bits = data.draw(st.sampled_from([1, 3, 4, 8, 11]))
    bucket_size = data.draw(st.sampled_from([1, 3, 100, 512, 5000]))
    num_payloads = data.draw(st.integers(1, 3))
    weight = data.draw(st.sampled_from([1.0, -1 / 3, 3.0]))
    numels = [x.numel() for x in xs]
    payloads = []
    for i in range(num_payloads):
        payload = torch.empty(kernels.quantize_nbytes(numels, bits, bucket_size), dtype=torch.uint8)
        kernels.quantize(xs, payload, [i] * len(xs), bits, 2**bits - 1, bucket_size, "max")
        payloads.append(payload)

    def compute():
        outs, added = clones(xs), [torch.zeros_like(x) for x in xs]
        finite = kernels.dequantize_sum(payloads, outs, weight, bits, 2**bits - 1, bucket_size)
        for payload in payloads:
            kernels.dequantize_add(payload, added, weight, bits, 2**bits - 1, bucket_size)
        assert finite == kernels.all_finite(added)
        for out, total in zip(outs, added, strict=True):
            torch.testing.assert_close(out, total, rtol=0, atol=0, equal_nan=True)
        return [finite, *outs]

    assert_backends_agree(compute)


@settings(max_examples=100, deadline=None)
@given(segments(), st.booleans())
def test_sign(xs, alias):
    def compute():
        work = clones(xs)
        residuals = work if alias else clones(xs)
        payload = torch.empty(kernels.sign_nbytes([x.numel() for x in xs]), dtype=torch.uint8)
        kernels.sign_pack(work, payload, residuals)
        outs = clones(xs)
        kernels.sign_decode_add(payload, outs, 0.3)
        return [payload, *residuals, *outs]

    assert_backends_agree(compute)


@settings(max_examples=100, deadline=None)
@given(segments(), st.data())
def test_add_topk(xs, data):
    counts = [data.draw(st.integers(0, x.numel())) for x in xs]
    factor = data.draw(st.sampled_from([1.0, 2.0**-16, -1 / 3]))
    es = [x.flip(0) for x in xs]

    def compute():
        outs = [torch.empty_like(x) for x in xs]
        indices, values = kernels.add_topk(xs, es, outs, factor, counts)
        return [*outs, indices, values]

    assert_backends_agree(compute)


@settings(max_examples=100, deadline=None)
@given(segments(), st.data())
def test_selection(xs, data):
    counts = [data.draw(st.integers(0, x.numel())) for x in xs]
    thresholds = [data.draw(st.sampled_from([0.0, 1e-40, 0.5, 1.0, 2.5, float("inf")])) for _ in xs]

    def compute():
        indices, values = kernels.topk(xs, counts)
        outs = [torch.zeros_like(x) for x in xs]
        kernels.scatter(outs, indices, values, counts)
        kernels.scatter_add(outs, indices, values, counts, -0.7)
        rest = clones(xs)
        kernels.clear(rest, indices, counts)
        return [indices, values, *outs, *rest, *kernels.select(xs, thresholds), kernels.all_finite(xs)]

    assert_backends_agree(compute)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 3000), max_size=3), st.data())
def test_indices(numels, data):
    counts = [data.draw(st.integers(0, n)) for n in numels]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    kept = [torch.randperm(n, generator=generator)[:k].sort().values.int() for n, k in zip(numels, counts, strict=True)]
    indices = torch.cat([torch.empty(0, dtype=torch.int32), *kept])
    nbytes = sum(map(kernels.indices_nbytes, counts, numels))
    flip = (data.draw(st.integers(0, nbytes - 1)), 1 << data.draw(st.integers(0, 7))) if nbytes else None

    def compute():
        payload = torch.empty(nbytes, dtype=torch.uint8)
        kernels.pack_indices(indices, counts, numels, payload)
        corrupt = payload.clone()
        if flip:
            corrupt[flip[0]] ^= flip[1]
        try:
            decoded = kernels.unpack_indices(corrupt, counts, numels)
        except ValueError:
            decoded = torch.empty(0, dtype=torch.int32)
        assert torch.equal(kernels.unpack_indices(payload, counts, numels), indices)
        return [payload, decoded]

    assert_backends_agree(compute)


def test_large_segments():
    """Past the C++ backend's sampling and chunking sizes."""
    xs = [torch.randn(1_500_001, generator=torch.Generator().manual_seed(s)) for s in range(2)]

    def compute():
        work = clones(xs)
        payload = torch.empty(kernels.quantize_nbytes([1_500_001] * 2, 3, 10**6), dtype=torch.uint8)
        kernels.quantize(work, payload, [1, 2], 3, 7, 10**6, "l2", work)
        signs = torch.empty(kernels.sign_nbytes([1_500_001] * 2), dtype=torch.uint8)
        kernels.sign_pack(xs, signs)
        return [payload, *work, signs, *kernels.topk(xs, [1500, 700_000]), *kernels.select(xs, [3.0, 0.1])]

    assert_backends_agree(compute)


@pytest.mark.parametrize("shape", ["normal", "ties", "one_sided"])
def test_large_selections(shape):
    """More than are buffered: the threshold is found first, near the guess or, where the guess is wrong, among all."""
    x = torch.randn(3_000_000, generator=torch.Generator().manual_seed(7))
    if shape == "ties":
        x = x.round()
    elif shape == "one_sided":  # neighbouring chunks are not alike, and the sample sees few of the large
        x[100_000:] *= 1e-6
    counts = [count for chunk in (4096, 100) for count in (1, chunk // 64, chunk // 2)]

    def compute():
        in_chunks = [kernels.topk_in_chunks([x], 4096 if i < 3 else 100, k, [0]) for i, k in enumerate(counts)]
        return [*kernels.topk([x], [300_000]), *(t for pair in in_chunks for t in pair)]

    assert_backends_agree(compute)


@pytest.mark.parametrize("count", [1, 3, 10, 200, 1000, 10_000, 100_000, 300_000, 600_001, 999_999])
def test_random_indices_and_their_code_at_every_density(count):
    """Low parts of Elias-Fano of 0 to 20 bits, and bitmaps; code that begins inside a byte."""
    numels = [1_000_000, 1_000_003]

    def compute():
        indices = kernels.random_indices([5, 6], [count] * 2, numels)
        code = torch.empty(sum(kernels.indices_nbytes(count, n) for n in numels), dtype=torch.uint8)
        kernels.pack_indices(indices, [count] * 2, numels, code)
        assert torch.equal(kernels.unpack_indices(code, [count] * 2, numels), indices)
        return [indices, code]

    assert_backends_agree(compute)


def test_uniform():
    assert_backends_agree(lambda: [kernels.uniform(2**64 - 5, 100_000)])


def test_norm_is_the_smallest_float32_whose_square_is_at_least_the_sum():
    """The root of x^2 is |x| itself, to the bit, though PyTorch's square root is not correctly rounded."""
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))

    def compute():
        payload = torch.empty(kernels.quantize_nbytes([100_000], 1, 1), dtype=torch.uint8)
        kernels.quantize([x], payload, [0], 1, 1, 1, "l2")
        assert torch.equal(payload[:400_000].clone().view(torch.float32), x.abs())
        return [payload]

    assert_backends_agree(compute)


def test_native_module_guards_itself():
    """Its own checks hold even where `thinwire.kernels` is bypassed."""
    x, out = torch.ones(8).numpy(), torch.empty(7, dtype=torch.uint8).numpy()
    with pytest.raises(ValueError, match="size"):
        _native.quantize([x], out, [1], 4, 14, 512, False, [])
    with pytest.raises(TypeError):
        _native.quantize([x.astype("float64")], out, [1], 4, 14, 512, False, [])


@pytest.mark.parametrize("module", [kernels, layout, random])
def test_examples_run(module):
    assert doctest.testmod(module).failed == 0
