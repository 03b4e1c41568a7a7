"""What `thinwire.testing.check_codec` cannot know: any values at all, statistics, formulas, and messages."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers.cases import case
from helpers.codecs import CODECS, every_codec
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import thinwire as tw
from thinwire.testing import check_encoding


def sparse(codec: tw.codec.Codec) -> bool:
    """Sparsifiers' statistics have a file of their own, `test_sparse.py`."""
    return "RandomK" in repr(codec)


floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
arrays = hnp.arrays(np.float32, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=16), elements=floats)


def bits_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    same = a.dtype == b.dtype and a.shape == b.shape
    return same and a.contiguous().numpy().tobytes() == b.contiguous().numpy().tobytes()


@every_codec
@settings(max_examples=5)
@given(array=arrays, seed=st.integers(0, 2**32))
def test_any_shape_any_values(codec, array, seed):
    """`check_codec` tries chosen shapes and hard values, hypothesis the others."""
    check_encoding(codec, torch.from_numpy(array), tw.codec.Key(seed))


def test_quantizers_draw_other_numbers_for_another_key():
    x = torch.randn(5000, generator=torch.Generator().manual_seed(4))
    for codec in CODECS:
        if isinstance(codec, tw.QSGD):
            assert not torch.equal(codec.encode(x, tw.codec.Key(1, 2, 3)), codec.encode(x, tw.codec.Key(1, 2, 4)))


def test_a_payload_of_a_wrong_size_is_named_with_the_right_one():
    for codec in CODECS:
        payload = codec.encode(torch.ones(100))
        message = r"payload for 100 elements has \d+ bytes, got" if codec.traits.fixed_size else "payload"
        for wrong in (payload[:-1], torch.cat([payload, payload[:1]])):
            with case(codec), pytest.raises(ValueError, match=message):
                codec.decode(wrong, 100, tw.codec.Key())


@pytest.mark.parametrize("codec", [c for c in CODECS if c.traits.unbiased and not sparse(c)], ids=repr)
def test_unbiased(codec):
    """The mean of m decodings is x within 5 standard errors of the largest possible step (chance under 1e-5)."""
    x = torch.randn(2048, generator=torch.Generator().manual_seed(6))
    m = 400
    keys = [tw.codec.Key(0, 0, step) for step in range(m)]
    decoded = codec.decode(codec.encode([x] * m, keys), [2048] * m, keys)
    mean = torch.stack(decoded).double().mean(0)
    step, codec = 0.0, getattr(codec, "codec", codec)  # entropy coding loses nothing
    if isinstance(codec, tw.QSGD):
        scales = [(b.norm() if codec.norm == "l2" else b.abs().max()) for b in x.split(codec.bucket_size or x.numel())]
        step = 2 * max(scales).item() / codec.num_steps
    elif isinstance(
        codec, (tw.codec.Quantize, tw.NUQSGD, tw.codec.Float4, tw.codec.Dynamic8, tw.ALQ, tw.AMQ, tw.TernGrad)
    ):
        step = max(b.norm().item() for b in x.split(codec.bucket_size))  # a loose bound; test_quantizers.py has theirs
    elif isinstance(codec, tw.codec.NaturalCompression):
        step = 2 * x.abs().max().item()
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


@pytest.mark.parametrize(
    "links",
    [
        (tw.TopK(0.1), tw.QSGD(bits=4), tw.codec.Huffman()),
        (tw.codec.DCT(8), tw.codec.BlockwiseTopK(0.1), tw.QSGD(bits=4)),
    ],
)
def test_a_chain_goes_on_where_it_ended(links):
    """It was refused, since a chain itself has no symbols and is no sparsifier."""
    assert tw.chain(tw.chain(*links[:-1]), links[-1]) == tw.chain(*links)


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
    decoded = tw.codec.SignNorm().decode(tw.codec.SignNorm().encode(x), 4097)
    mean = x.double().abs().mean()
    assert torch.equal(decoded > 0, x >= 0)
    torch.testing.assert_close(decoded.abs().double(), mean.expand(4097), rtol=2.0**-23, atol=0)
    lost = x.double().square().sum() - x.double().abs().sum() ** 2 / 4097
    torch.testing.assert_close((x - decoded).double().square().sum(), lost, rtol=1e-5, atol=0)


def test_cast_rounds_as_pytorch_does():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(10)) * 1e3
    for codec, dtype in ((tw.Cast(), torch.bfloat16), (tw.Cast("float16"), torch.float16)):
        assert bits_equal(codec.decode(codec.encode(x), 1000), x.to(dtype).float())


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
        (lambda: tw.chain(tw.QSGD(bits=4), tw.codec.Rice()), "Rice codes the indices of a sparsifier"),
        (lambda: tw.chain(tw.RandomK(0.1), tw.codec.Rice()), "not those of RandomK"),
        (
            lambda: tw.chain(tw.TopK(0.1), tw.codec.Huffman(), tw.codec.Huffman()),
            r"before it, and Huffman\(\) is no codec",
        ),
        (lambda: tw.chain(tw.TopK(0.1, indices="auto"), tw.codec.Rice()), "not those of TopK"),
        (lambda: tw.TopK(0.1).encode(torch.arange(3)), "only float tensors"),
        (lambda: tw.TopK(0.1).encode([torch.ones(2)] * 2, [tw.codec.Key()]), "2 segments need as many keys"),
        (lambda: tw.TopK(0.1).encode(torch.ones(2), residual=[]), "1 segments need as many residuals, got 0"),
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
    codec = tw.TopK(tw.schedule.GeometricWarmup(0.01))
    with pytest.raises(ValueError, match="has no value yet: use the codec in an averager"):
        codec.encode(torch.ones(10))
    with pytest.raises(ValueError, match="has no value yet"):
        tw.QSGD(bits=tw.schedule.Values((8, 4))).nbytes(10)
