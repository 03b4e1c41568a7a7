"""The C++ backend writes the reference's bytes for every input: any sizes, any bit patterns."""

from __future__ import annotations

import doctest
import importlib
import math
import pkgutil

import pytest
import torch
from helpers.backends import assert_backends_agree, clones, segments
from helpers.cases import case
from hypothesis import given, settings
from hypothesis import strategies as st

import thinwire as tw
from thinwire import kernels
from thinwire.kernels import _native
from thinwire.kernels.levels import Levels
from thinwire.kernels.quantize import Quantizer, Quantizers


@settings(max_examples=75)
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
        quantizer = Quantizer(bits, num_steps, bucket_size, norm)
        payload = torch.empty(quantizer.nbytes([x.numel() for x in xs]), dtype=torch.uint8)
        kernels.quantize.encode(work, payload, keys, quantizer, residuals)
        outs = clones(xs)
        kernels.quantize.decode_add(payload, outs, weight, quantizer)
        return [payload, *residuals, *outs]

    assert_backends_agree(compute)


@settings(max_examples=30)
@given(segments().filter(len), st.data())
def test_a_quantizer_for_each_segment(xs, data):
    """The payload is that of each distinct quantizer alone, on every backend."""
    bits = data.draw(st.lists(st.integers(1, 12), min_size=len(xs), max_size=len(xs)))
    norm, bucket_size = data.draw(st.sampled_from(["max", "l2"])), data.draw(st.sampled_from([3, 512, 5000]))
    each = [Quantizer(b, 2**b - 1, bucket_size + b, norm) for b in bits]
    quantizers, numels = Quantizers.of(each), [x.numel() for x in xs]

    def compute():
        residuals, outs, sums = clones(xs), clones(xs), clones(xs)
        payload = torch.empty(quantizers.nbytes(numels), dtype=torch.uint8)
        kernels.quantize.encode(xs, payload, list(range(len(xs))), quantizers, residuals)
        kernels.quantize.decode_add(payload, outs, 0.5, quantizers)
        kernels.quantize.decode_sum([payload, payload], sums, 0.5, quantizers)
        return [payload, *residuals, *outs, *sums]

    assert_backends_agree(compute)
    payload, *others = compute()
    start = 0
    for quantizer in dict.fromkeys(each):
        at = [i for i, q in enumerate(each) if q == quantizer]
        alone = torch.empty(quantizer.nbytes([numels[i] for i in at]), dtype=torch.uint8)
        residuals, outs, sums = ([clones(xs)[i] for i in at] for _ in range(3))
        kernels.quantize.encode([xs[i] for i in at], alone, at, quantizer, residuals)
        kernels.quantize.decode_add(alone, outs, 0.5, quantizer)
        kernels.quantize.decode_sum([alone, alone], sums, 0.5, quantizer)
        assert torch.equal(payload[start : start + alone.numel()], alone)
        start += alone.numel()
        expected = [*residuals, *outs, *sums]
        found = [others[part * len(xs) + i] for part in range(3) for i in at]
        assert all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(found, expected, strict=True))
    assert start == payload.numel()


def level_sets(data):
    """Levels that are near each other, far apart, powers of two, evenly spaced, or inside of the scale; of any number."""
    count = data.draw(st.integers(2, 256))
    kind = data.draw(st.sampled_from(["any", "powers", "even", "close", "inside"]))
    if kind == "powers":
        return tw.NUQSGD(bits=data.draw(st.integers(2, 8)), zero=data.draw(st.booleans())).level_values
    if kind == "even":
        return torch.linspace(-1, 1, count).tolist()
    found = torch.rand(count, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99)))) * 2 - 1
    if kind == "close":
        found = found.sign() * 2.0 ** (-100 * found.abs())
    ends = set() if kind == "inside" else {-1.0, 1.0}  # elements beyond the outer levels get these
    return sorted({*ends, *found.tolist()})[-256:]


@settings(max_examples=75)
@given(segments(), st.data())
def test_levels(xs, data):
    levels = Levels(
        level_sets(data),
        bucket_size=data.draw(st.sampled_from([1, 3, 100, 512, 5000])),
        norm=data.draw(st.sampled_from(["max", "l2"])),
    )
    keys = [data.draw(st.integers(0, 2**64 - 1)) for _ in xs]
    for x in xs:  # numbers that are levels
        x[: len(levels.values)] *= torch.tensor(levels.values)[: x.numel()] if data.draw(st.booleans()) else 1

    def compute():
        work, outs = clones(xs), clones(xs)
        payload = torch.empty(levels.nbytes([x.numel() for x in xs]), dtype=torch.uint8)
        kernels.levels.encode(work, payload, keys, levels, residuals=work)
        kernels.levels.decode_add(payload, outs, -1 / 3, levels)
        return [payload, *work, *outs]

    assert_backends_agree(compute)


def test_powers_of_two_at_and_beside_each_level():
    """Their codes follow from exponents: exact at levels, next to them, beyond the largest, and near zero."""
    for bits in range(2, 9):
        for zero in (True, False):
            levels = Levels(tw.NUQSGD(bits=bits, zero=zero).level_values, bucket_size=4096, norm="max")
            at = torch.tensor(levels.values)
            beside = [at.nextafter(torch.tensor(end)) for end in (-1.0, 1.0)]
            near_zero = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-39, -1e-39, 1e-20, -1e-20])
            x = torch.cat([at, *beside, 0.75 * at, near_zero])
            for scale in (1.0, 3.0, 2.0**100, 2.0**-100):
                with case(bits, zero, scale):
                    assert_backends_agree(lambda x=x * scale, levels=levels: level_codes(x, levels))


def level_codes(x, levels):
    payload, residual = torch.empty(levels.nbytes([x.numel()]), dtype=torch.uint8), torch.empty_like(x)
    kernels.levels.encode([x], payload, [7], levels, residuals=[residual])
    return [payload, residual]


@settings(max_examples=100)
@given(segments(), st.sampled_from(list(kernels.cast.WIDTHS)), st.booleans())
def test_cast(xs, dtype, alias):
    def compute():
        work = clones(xs)
        residuals = work if alias else clones(xs)
        payload = torch.empty(kernels.cast.nbytes([x.numel() for x in xs], dtype), dtype=torch.uint8)
        kernels.cast.encode(work, payload, dtype, residuals)
        outs = clones(xs)
        kernels.cast.decode_add(payload, outs, 0.3, dtype)
        return [payload, *residuals, *outs]

    assert_backends_agree(compute)


@settings(max_examples=50)
@given(segments(), st.data())
def test_quantized_sum(xs, data):
    """Overwrites, adds in order, and tells whether all is finite; the C++ backend in blocks, over all payloads at once."""
    bits = data.draw(st.sampled_from([1, 3, 4, 8, 11]))
    bucket_size = data.draw(st.sampled_from([1, 3, 100, 512, 5000]))
    num_payloads = data.draw(st.integers(1, 3))
    weight = data.draw(st.sampled_from([1.0, -1 / 3, 3.0]))
    numels = [x.numel() for x in xs]
    quantizer, payloads = Quantizer(bits, 2**bits - 1, bucket_size), []
    for i in range(num_payloads):
        payload = torch.empty(quantizer.nbytes(numels), dtype=torch.uint8)
        kernels.quantize.encode(xs, payload, [i] * len(xs), quantizer)
        payloads.append(payload)

    def compute():
        outs, added = clones(xs), [torch.zeros_like(x) for x in xs]
        finite = kernels.quantize.decode_sum(payloads, outs, weight, quantizer)
        for payload in payloads:
            kernels.quantize.decode_add(payload, added, weight, quantizer)
        assert finite == kernels.all_finite(added)
        for out, total in zip(outs, added, strict=True):
            torch.testing.assert_close(out, total, rtol=0, atol=0, equal_nan=True)
        return [finite, *outs]

    assert_backends_agree(compute)


@settings(max_examples=50)
@given(segments(), st.booleans())
def test_sign(xs, alias):
    def compute():
        work = clones(xs)
        residuals = work if alias else clones(xs)
        payload = torch.empty(kernels.sign.nbytes([x.numel() for x in xs]), dtype=torch.uint8)
        kernels.sign.encode(work, payload, residuals)
        outs = clones(xs)
        kernels.sign.decode_add(payload, outs, 0.3)
        return [payload, *residuals, *outs]

    assert_backends_agree(compute)


@settings(max_examples=50)
@given(segments(), st.data())
def test_add_topk(xs, data):
    counts = [data.draw(st.integers(0, x.numel())) for x in xs]
    factor = data.draw(st.sampled_from([1.0, 2.0**-16, -1 / 3]))
    es = [x.flip(0) for x in xs]

    def compute():
        outs = [torch.empty_like(x) for x in xs]
        indices, values = kernels.momentum.add_topk(xs, es, outs, factor, counts)
        return [*outs, indices, values]

    assert_backends_agree(compute)


@settings(max_examples=50)
@given(segments(), st.data())
def test_selection(xs, data):
    counts = [data.draw(st.integers(0, x.numel())) for x in xs]
    thresholds = [data.draw(st.sampled_from([0.0, 1e-40, 0.5, 1.0, 2.5, float("inf")])) for _ in xs]

    def compute():
        indices, values = kernels.select.topk(xs, counts)
        outs = [torch.zeros_like(x) for x in xs]
        kernels.scatter.write(outs, indices, values, counts)
        kernels.scatter.add(outs, indices, values, counts, -0.7)
        rest = clones(xs)
        kernels.scatter.clear(rest, indices, counts)
        marked = kernels.scatter.gather_marked(xs, indices, counts)
        return [indices, values, *outs, *rest, marked, *kernels.select.above(xs, thresholds), kernels.all_finite(xs)]

    assert_backends_agree(compute)


@pytest.mark.parametrize("kind", ["distinct", "ties", "two halves"])
def test_many_largest(kind):
    """So many that candidates are collected in the output; with ties at the cut; and where few lie near the cut."""
    x = torch.randn(900_000, generator=torch.Generator().manual_seed(0))
    if kind == "ties":
        x = x.round(decimals=1)
    elif kind == "two halves":
        x[450_000:] *= 100.0
    assert_backends_agree(lambda: list(kernels.select.topk([x[1:], x[:5]], [300_001, 2])))


@settings(max_examples=75)
@given(st.lists(st.integers(0, 3000), max_size=3), st.data())
def test_indices(numels, data):
    counts = [data.draw(st.integers(0, n)) for n in numels]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    kept = [torch.randperm(n, generator=generator)[:k].sort().values.int() for n, k in zip(numels, counts, strict=True)]
    indices = torch.cat([torch.empty(0, dtype=torch.int32), *kept])
    nbytes = sum(map(kernels.indices.nbytes, counts, numels))
    flip = (data.draw(st.integers(0, nbytes - 1)), 1 << data.draw(st.integers(0, 7))) if nbytes else None

    def compute():
        payload = torch.empty(nbytes, dtype=torch.uint8)
        kernels.indices.encode(indices, counts, numels, payload)
        corrupt = payload.clone()
        if flip:
            corrupt[flip[0]] ^= flip[1]
        try:
            decoded = kernels.indices.decode(corrupt, counts, numels)
        except ValueError:
            decoded = torch.empty(0, dtype=torch.int32)
        assert torch.equal(kernels.indices.decode(payload, counts, numels), indices)
        return [payload, decoded]

    assert_backends_agree(compute)


def test_large_segments():
    """Past the C++ backend's sampling and chunking sizes."""
    xs = [torch.randn(1_500_001, generator=torch.Generator().manual_seed(s)) for s in range(2)]

    def compute():
        work = clones(xs)
        quantizer = Quantizer(3, 7, 10**6, "l2")
        payload = torch.empty(quantizer.nbytes([1_500_001] * 2), dtype=torch.uint8)
        kernels.quantize.encode(work, payload, [1, 2], quantizer, work)
        signs = torch.empty(kernels.sign.nbytes([1_500_001] * 2), dtype=torch.uint8)
        kernels.sign.encode(xs, signs)
        return [payload, *work, signs, *kernels.select.topk(xs, [1500, 700_000]), *kernels.select.above(xs, [3.0, 0.1])]

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
        in_chunks = [kernels.select.topk_in_chunks([x], 4096 if i < 3 else 100, k, [0]) for i, k in enumerate(counts)]
        return [*kernels.select.topk([x], [300_000]), *(t for pair in in_chunks for t in pair)]

    assert_backends_agree(compute)


@pytest.mark.parametrize("count", [1, 3, 10, 200, 1000, 10_000, 100_000, 300_000, 600_001, 999_999])
def test_random_indices_and_their_code_at_every_density(count):
    """Low parts of Elias-Fano of 0 to 20 bits, and bitmaps; code that begins inside a byte."""
    numels = [1_000_000, 1_000_003]

    def compute():
        indices = kernels.permutation.random_indices([5, 6], [count] * 2, numels)
        code = torch.empty(sum(kernels.indices.nbytes(count, n) for n in numels), dtype=torch.uint8)
        kernels.indices.encode(indices, [count] * 2, numels, code)
        assert torch.equal(kernels.indices.decode(code, [count] * 2, numels), indices)
        return [indices, code]

    assert_backends_agree(compute)


def test_uniform():
    assert_backends_agree(lambda: [kernels.uniform(2**64 - 5, 100_000)])


def test_norm_is_the_smallest_float32_whose_square_is_at_least_the_sum():
    """The root of x^2 is |x| itself, to the bit, though PyTorch's square root is not correctly rounded."""
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))

    def compute():
        quantizer = Quantizer(1, 1, 1, "l2")
        payload = torch.empty(quantizer.nbytes([100_000]), dtype=torch.uint8)
        kernels.quantize.encode([x], payload, [0], quantizer)
        assert torch.equal(payload[:400_000].clone().view(torch.float32), x.abs())
        return [payload]

    assert_backends_agree(compute)


def test_native_module_guards_itself():
    """Its own checks hold even where `thinwire.kernels` is bypassed."""
    x, out = torch.ones(8).numpy(), torch.empty(7, dtype=torch.uint8).numpy()
    quantizer = _native.Quantizers([_native.Quantizer(_native.Buckets(4, 512, False), 14)], [])
    with pytest.raises(ValueError, match="size"):
        _native.quantize_encode([x], out, [1], quantizer, [])
    with pytest.raises(TypeError):
        _native.quantize_encode([x.astype("float64")], out, [1], quantizer, [])
    with pytest.raises(TypeError):
        _native.quantize_encode([x[::2]], out, [1], quantizer, [])


FAMILIES = [name for _, name, is_package in pkgutil.iter_modules(kernels.__path__) if not is_package]


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "_native"])
def test_examples_run(name):
    assert doctest.testmod(importlib.import_module(f"thinwire.kernels.{name}")).failed == 0


@settings(max_examples=50)
@given(st.lists(st.sampled_from([0, 1, 17, 40_000]), min_size=1, max_size=3), st.integers(1, 3), st.data())
def test_sum_of_selected_elements(numels, num_payloads, data):
    """Overwrites, adds in the order of the payloads, and tells whether all is finite; the C++ backend block by block."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    share, hole = data.draw(st.sampled_from([0.0, 0.01, 1.0])), data.draw(st.sampled_from([0.0, math.inf, math.nan]))
    picks = [
        [(torch.rand(n, generator=generator) < share).nonzero().view(-1).int() for n in numels]
        for _ in range(num_payloads)
    ]
    indices, counts = [torch.cat(p) for p in picks], [[i.numel() for i in p] for p in picks]
    values = [torch.randn(i.numel(), generator=generator) for i in indices]
    if indices[0].numel():
        values[0][-1] += hole

    def compute():
        outs = [torch.full((n,), math.nan) for n in numels]
        finite = kernels.scatter.total(outs, indices, values, counts, -1 / 3)
        return [*outs, torch.tensor(finite)]

    assert_backends_agree(compute)
