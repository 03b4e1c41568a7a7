"""The conformance suite: every codec keeps the contract of `codec/base.py`. What is special to one stands below."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pytest
import torch
from helpers.codecs import CODECS, every_codec
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import thinwire as tw
from thinwire import kernels


def sparse(codec: tw.Codec) -> bool:
    """Sparsifiers' statistics have a file of their own, `test_sparse.py`."""
    return "RandomK" in repr(codec)


floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
arrays = hnp.arrays(np.float32, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=40), elements=floats)


def bits_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    same = a.dtype == b.dtype and a.shape == b.shape
    return same and a.contiguous().numpy().tobytes() == b.contiguous().numpy().tobytes()


def has_size(codec: tw.Codec, payload: torch.Tensor, size) -> bool:
    """Exactly that of `nbytes`, or at most where it depends on the data."""
    return payload.numel() == codec.nbytes(size) or (not codec.fixed_size and payload.numel() < codec.nbytes(size))


@every_codec
@pytest.mark.parametrize("bad", [None, math.inf, math.nan])
def test_decode_sum_is_the_sum_of_decodings_and_knows_whether_it_is_finite(codec, bad):
    xs = [torch.randn(30, 20, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    if bad is not None:
        xs[1][7, 7] = bad
    payloads, key = [codec.encode(x, tw.codec.Key(5)) for x in xs], tw.codec.Key(5)
    expected, out = torch.zeros(30, 20), torch.full((30, 20), math.nan)
    for payload in payloads:
        codec.decode_add(payload, expected, 0.25, key)
    finite = codec.decode_sum(payloads, out, 0.25, key)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    assert finite == bool(out.isfinite().all())
    with pytest.raises(ValueError):
        codec.decode_sum(payloads, out.double(), 0.25, key)


@every_codec
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_a_payload_may_start_at_any_address_and_a_short_one_is_refused(codec, offset):
    """Decoders and `support` read an unaligned payload as an aligned one, and raise ValueError if it is cut short."""
    x, key = torch.randn(30, 20, generator=torch.Generator().manual_seed(0)), tw.codec.Key(5)
    payload = codec.encode(x, key)
    unaligned = torch.empty(payload.numel() + offset, dtype=torch.uint8)[offset:].copy_(payload)

    def decoded(payload: torch.Tensor) -> list[torch.Tensor]:
        added, summed = torch.ones(30, 20), torch.empty(30, 20)
        codec.decode_add(payload, added, 0.5, key)
        codec.decode_sum([payload], summed, 0.5, key)
        kept = codec.support(payload, x.shape, key)
        return [codec.decode(payload, x.shape, key), added, summed] + ([] if kept is None else [kept.indices])

    for ours, truth in zip(decoded(unaligned), decoded(payload), strict=True):
        assert bits_equal(ours, truth)
    reads = [lambda p: codec.decode(p, x.shape, key), lambda p: codec.decode_sum([p], torch.empty(30, 20), 1.0, key)]
    for short in (unaligned[:offset], unaligned[:-offset], payload[: payload.numel() // 2]):
        for read in reads:
            with pytest.raises(ValueError):
                read(short)
        with contextlib.suppress(ValueError):  # the support may be whole, or none
            codec.support(short, x.shape, key)


@every_codec
@settings(max_examples=20)
@given(array=arrays, seed=st.integers(0, 2**32))
def test_any_shape_any_values(codec, array, seed):
    """Exact size, both backends alike, residual = x - decode(encode(x)), input untouched, in place the same."""
    x, key = torch.from_numpy(array), tw.codec.Key(seed)
    before = x.clone()
    residual = torch.empty_like(x)
    payload = codec.encode(x, key, residual)
    assert bits_equal(x, before)
    assert payload.dtype == torch.uint8 and has_size(codec, payload, x.shape)
    decoded = codec.decode(payload, x.shape, key)
    torch.testing.assert_close(residual, x - decoded, rtol=0, atol=0, equal_nan=True)

    in_place = x.clone()
    assert torch.equal(codec.encode(in_place, key, in_place), payload)
    torch.testing.assert_close(in_place, residual, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(codec.encode(x, key), payload)
    with kernels.use_backend("reference"):
        assert torch.equal(codec.encode(x, key), payload)
        assert bits_equal(codec.decode(payload, x.shape, key), decoded)


@every_codec
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("position", [0, 511, 1499])
def test_not_finite_is_never_lost(codec, bad, position):
    x = torch.randn(1500, generator=torch.Generator().manual_seed(0))
    x[position] = bad
    decoded = codec.decode(codec.encode(x, tw.codec.Key(3)), 1500, tw.codec.Key(3))
    assert not torch.isfinite(decoded).all()


@every_codec
def test_segments_are_encoded_one_by_one(codec):
    """One call for many segments decodes to what a call for each does; sizes add up."""
    generator = torch.Generator().manual_seed(1)
    xs = [torch.randn(n, generator=generator) for n in (1000, 1, 0, 37)]
    keys = [tw.codec.Key(7, stream, 2) for stream in range(4)]
    residuals = [torch.empty_like(x) for x in xs]
    payload = codec.encode(xs, keys, residuals)
    sizes = [x.numel() for x in xs]
    assert has_size(codec, payload, sizes)
    assert codec.nbytes(sizes) == sum(map(codec.nbytes, sizes)) or not codec.fixed_size
    for x, key, decoded, residual in zip(xs, keys, codec.decode(payload, sizes, keys), residuals, strict=True):
        alone = codec.decode(codec.encode(x, key), x.numel(), key)
        assert bits_equal(decoded, alone)
        assert bits_equal(residual, x - alone)


@every_codec
def test_decode_add_accumulates(codec):
    x = torch.randn(777, generator=torch.Generator().manual_seed(2))
    payload = codec.encode(x, tw.codec.Key(1))
    out = torch.arange(777, dtype=torch.float32)
    codec.decode_add(payload, out, weight=0.25, key=tw.codec.Key(1))
    expected = torch.arange(777, dtype=torch.float64) + 0.25 * codec.decode(payload, 777, tw.codec.Key(1)).double()
    # one rounding of the product and one of the sum, each half a unit in the last place of numbers below 1024
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2 * 2.0**-14)


@every_codec
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_types_and_strides(codec, dtype):
    x = torch.randn(30, 40, generator=torch.Generator().manual_seed(3)).to(dtype).t()
    expected = codec.encode(x.float().contiguous(), tw.codec.Key(5))
    assert torch.equal(codec.encode(x, tw.codec.Key(5)), expected)


@every_codec
def test_random_numbers_depend_on_the_key_alone(codec):
    x = torch.randn(5000, generator=torch.Generator().manual_seed(4))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = codec.encode(x, tw.codec.Key(1, 2, 3))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert torch.equal(codec.encode(x, tw.codec.Key(1, 2, 3)), first)
    if isinstance(codec, tw.QSGD):
        assert not torch.equal(codec.encode(x, tw.codec.Key(1, 2, 4)), first)


@every_codec
def test_wrong_payload_size_is_the_callers_mistake(codec):
    payload = codec.encode(torch.ones(100))
    for wrong in (payload[:-1], torch.cat([payload, payload[:1]])):
        message = r"payload for 100 elements has \d+ bytes, got" if codec.fixed_size else "payload"
        with pytest.raises(ValueError, match=message):
            codec.decode(wrong, 100, tw.codec.Key())


@pytest.mark.parametrize("codec", [c for c in CODECS if not c.summable and not c.unbiased], ids=repr)
def test_corrupt_payload_never_reaches_beyond_the_output(codec):
    """Random bytes decode to something or raise ValueError; guards around the output stay as they were."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(200):
        payload = torch.randint(0, 256, (codec.nbytes(500),), dtype=torch.uint8, generator=generator)
        memory = torch.full((700,), 3.0)
        try:
            codec.decode_add(payload, memory[100:600])
        except ValueError as error:
            assert "ind" in str(error) or "payload" in str(error)
        assert (memory[:100] == 3).all() and (memory[600:] == 3).all()


@every_codec
def test_repr_round_trips(codec):
    assert tw.parse(repr(codec)) == codec
    assert hash(tw.parse(repr(codec))) == hash(codec)


@pytest.mark.parametrize("codec", [c for c in CODECS if c.unbiased and not sparse(c)], ids=repr)
def test_unbiased(codec):
    """The mean of m decodings is x within 5 standard errors of the largest possible step (chance under 1e-5)."""
    x = torch.randn(2048, generator=torch.Generator().manual_seed(6))
    m = 400
    mean = torch.zeros(2048, dtype=torch.float64)
    for step in range(m):
        mean += codec.decode(codec.encode(x, tw.codec.Key(0, 0, step)), 2048, tw.codec.Key(0, 0, step)).double() / m
    step, codec = 0.0, getattr(codec, "codec", codec)  # entropy coding loses nothing
    if isinstance(codec, tw.QSGD):
        scales = [(b.norm() if codec.norm == "l2" else b.abs().max()) for b in x.split(codec.bucket_size)]
        step = 2 * max(scales).item() / codec.num_steps
    elif isinstance(
        codec, (tw.Quantize, tw.NUQSGD, tw.ALQ, tw.AMQ, tw.TernGrad)
    ):  # their own statistics: test_quantizers.py
        step = max(b.norm().item() for b in x.split(codec.bucket_size))
    # The variance of rounding to one of two levels is at most step^2/4; 2048 coordinates are looked at.
    assert (mean - x.double()).abs().max() <= 5 * (step / 2) / math.sqrt(m) + 1e-6


@pytest.mark.parametrize("bits, bucket_size", [(2, 64), (4, 512), (8, 100)])
def test_qsgd_is_within_its_variance_bound(bits, bucket_size):
    """E|C(x)-x|^2 <= min(d/s^2, sqrt(d)/s)|x|^2 for the L2 scale (arXiv 1610.02132, lemma 3.1)."""
    codec = tw.QSGD(bits=bits, bucket_size=bucket_size, norm="l2")
    x = torch.randn(bucket_size * 20, generator=torch.Generator().manual_seed(7))
    error = 0.0
    for step in range(50):
        residual = torch.empty_like(x)
        codec.encode(x, tw.codec.Key(step=step), residual)
        error += residual.double().square().sum().item() / 50
    s = codec.num_steps / 2
    assert 0 < error <= min(bucket_size / s**2, math.sqrt(bucket_size) / s) * x.double().square().sum().item()


@settings(max_examples=100, deadline=None)
@given(array=hnp.arrays(np.float32, st.integers(1, 300), elements=floats), ratio=st.floats(0.001, 1))
def test_topk_keeps_exactly_the_largest(array, ratio):
    """Exactly k; the same coordinates as a stable sort by magnitude; the contraction bound."""
    x, codec = torch.from_numpy(array), tw.TopK(ratio)
    decoded = codec.decode(codec.encode(x), x.numel())
    k = codec.count(x.numel())
    order = np.argsort(-np.abs(array.astype(np.float64)), kind="stable")[:k]
    expected = np.zeros_like(array)
    expected[order] = array[order]
    np.testing.assert_array_equal(decoded.numpy(), expected)
    square = array.astype(np.float64) ** 2
    # The sums are rounded.
    assert square.sum() - square[order].sum() <= (1 - k / x.numel() + 1e-12) * square.sum()


@pytest.mark.parametrize(
    "ratio, n, k", [(0.01, 1, 1), (0.07, 100, 7), (0.001, 1000, 1), (0.5, 3, 2), (1, 5, 5), (0.3, 0, 0)]
)
def test_topk_count(ratio, n, k):
    assert tw.TopK(ratio).count(n) == k


@pytest.mark.parametrize("ratio, bits", [(0.001, 12), (0.01, 8.6), (0.1, 5.3)])
def test_topk_index_bits(ratio, bits):
    n = 1_000_000
    k = tw.TopK(ratio).count(n)
    assert (tw.TopK(ratio).nbytes(n) - 4 * k) * 8 / k <= bits


def test_chain_equals_its_parts_by_hand():
    """Top-k, then the quantizer on the kept values, scattered back."""
    x, key = torch.randn(3000, generator=torch.Generator().manual_seed(8)), tw.codec.Key(4, 5, 6)
    sparsifier, values = tw.TopK(0.1), tw.QSGD(bits=4, bucket_size=64)
    chained = tw.chain(sparsifier, values)
    kept = sparsifier.decode(sparsifier.encode(x), 3000)
    at = kept.nonzero().squeeze(1)
    by_hand = torch.zeros(3000)
    by_hand[at] = values.decode(values.encode(kept[at], key), at.numel())
    assert bits_equal(chained.decode(chained.encode(x, key), 3000), by_hand)


def test_sign_norm_formula():
    x = torch.randn(4097, generator=torch.Generator().manual_seed(9))
    decoded = tw.SignNorm().decode(tw.SignNorm().encode(x), 4097)
    mean = x.double().abs().mean()
    assert torch.equal(decoded > 0, x >= 0)
    torch.testing.assert_close(decoded.abs().double(), mean.expand(4097), rtol=2.0**-23, atol=0)
    lost = x.double().square().sum() - x.double().abs().sum() ** 2 / 4097
    torch.testing.assert_close((x - decoded).double().square().sum(), lost, rtol=1e-5, atol=0)


def test_cast_rounds_as_pytorch_does():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(10)) * 1e3
    for codec, dtype in ((tw.Cast(), torch.bfloat16), (tw.Cast("float16"), torch.float16)):
        assert bits_equal(codec.decode(codec.encode(x), 1000), x.to(dtype).float())


@pytest.mark.parametrize("codec", [tw.Identity(), tw.Cast(), tw.Cast("float16")], ids=repr)
def test_summable_payloads_add_on_the_wire(codec):
    a, b = torch.tensor([1.0, 2.0, -4.0]), torch.tensor([0.5, 8.0, 4.0])
    total = codec.encode(a).view(codec.sum_dtype) + codec.encode(b).view(codec.sum_dtype)
    assert torch.equal(codec.decode(total.view(torch.uint8), 3), a + b)


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: tw.TopK(0), "ratio must be above 0"),
        (lambda: tw.TopK(2), "ratio must be above 0 and at most 1, got 2"),
        (lambda: tw.TopK(math.nan), "ratio"),
        (lambda: tw.QSGD(bits=9), "bits must be an integer from 1 to 8, got 9"),
        (lambda: tw.QSGD(bits=1), "zero=False"),
        (lambda: tw.QSGD(bits=4, bucket_size=0), "bucket_size"),
        (lambda: tw.QSGD(bits=4, norm="l1"), "norm must be"),
        (lambda: tw.Cast("float8"), "dtype must be one of"),
        (lambda: tw.chain(tw.QSGD(bits=4), tw.TopK(0.1)), "first link must be a sparsifier"),
        (lambda: tw.chain(tw.TopK(0.1), tw.TopK(0.1)), "second link"),
        (lambda: tw.chain(tw.QSGD(bits=4), tw.Rice()), "Rice codes the indices of a sparsifier"),
        (lambda: tw.chain(tw.RandomK(0.1), tw.Rice()), "not those of RandomK"),
        (lambda: tw.chain(tw.TopK(0.1, indices="auto"), tw.Rice()), "not those of TopK"),
        (lambda: tw.TopK(0.1).encode(torch.arange(3)), "only float tensors"),
        (lambda: tw.TopK(0.1).encode([torch.ones(2)] * 2, [tw.codec.Key()]), "2 segments need as many keys"),
        (
            lambda: tw.TopK(0.1).encode(torch.ones(2), residual=torch.ones(3)),
            "residual must be contiguous float32 of 2",
        ),
        (lambda: tw.TopK(0.1).decode_add(torch.zeros(5, dtype=torch.uint8), torch.ones(4, 4).t()), "contiguous"),
    ],
)
def test_mistakes(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_a_codec_with_a_schedule_asks_for_an_averager():
    codec = tw.TopK(tw.GeometricWarmup(0.01))
    with pytest.raises(ValueError, match="has no value yet: use the codec in an averager"):
        codec.encode(torch.ones(10))
    with pytest.raises(ValueError, match="has no value yet"):
        tw.QSGD(bits=tw.Values((8, 4))).nbytes(10)
