"""Entropy coding: no loss, near the entropy, both backends alike, and safe on corrupt bytes."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.backends import assert_backends_agree
from hypothesis import given, settings
from hypothesis import strategies as st

import thinwire as tw
from thinwire.kernels import entropy as huffman
from thinwire.kernels.entropy import Symbols


def packed_symbols(counts, bits, skew, seed):
    """Random symbols, skewed or not, bit-packed by segment; and their entropy in bits each."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(2**bits, generator=generator).pow(skew) + 1e-12
    symbols = torch.multinomial(weights, max(1, sum(counts)), replacement=True, generator=generator)[: sum(counts)]
    parts = []
    for part in symbols.split(counts):
        stream = ((part[:, None] >> torch.arange(bits)) & 1).flatten()
        stream = torch.nn.functional.pad(stream, (0, -len(stream) % 8)).view(-1, 8)
        parts.append((stream << torch.arange(8)).sum(-1).to(torch.uint8))
    p = torch.bincount(symbols, minlength=2**bits).double() / max(1, len(symbols))
    return torch.cat(parts), -(p * p.clamp(min=1e-300).log2()).sum().item()


@settings(max_examples=75)
@given(st.lists(st.integers(0, 2000), min_size=1, max_size=3), st.integers(1, 8), st.data())
def test_backends_agree_on_right_and_on_corrupt_bytes(counts, bits, data):
    packed, _ = packed_symbols(
        counts, bits, data.draw(st.sampled_from([0, 1, 4, 20, 100])), data.draw(st.integers(0, 99))
    )
    flips = data.draw(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 7)), max_size=2))
    cut = data.draw(st.integers(0, 3))

    def compute():
        payload = huffman.encode(packed, Symbols(bits, counts))
        assert payload.numel() <= packed.numel() + 1
        assert torch.equal(huffman.decode(payload, Symbols(bits, counts)), packed)
        corrupt = payload.clone()
        for at, bit in flips:
            corrupt[at % len(corrupt)] ^= 1 << bit
        corrupt = corrupt[: max(0, len(corrupt) - cut)]
        try:
            decoded = huffman.decode(corrupt, Symbols(bits, counts))
        except ValueError as error:
            assert "corrupt" in str(error)  # noqa: PT017
            decoded = torch.empty(0, dtype=torch.uint8)
        return [payload, decoded]

    assert_backends_agree(compute)


@pytest.mark.parametrize("bits", [1, 4, 8])
def test_random_bytes_never_crash(bits):
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        payload = torch.randint(0, 256, (200,), dtype=torch.uint8, generator=generator)
        payload[0] = 1
        with pytest.raises(ValueError, match="corrupt"):
            huffman.decode(payload, Symbols(bits, [10_000]))


@pytest.mark.parametrize("bits", [1, 3, 4, 8])
def test_long_messages_and_their_corruptions(bits):
    """So many symbols that several are decoded at once; damage is refused, or decoded as the reference decodes it."""
    counts = [17_001, 3, 20_000]
    packed, _ = packed_symbols(counts, bits, skew=4 if bits > 1 else 0, seed=0)
    if bits == 1:
        packed &= 17  # three zeros of four
    payload = huffman.encode(packed, Symbols(bits, counts))
    assert torch.equal(huffman.decode(payload, Symbols(bits, counts)), packed)
    for flip in range(3):
        corrupt = payload.clone()
        corrupt[1 + flip * 7919 % (len(corrupt) - 1)] ^= 1 << flip

        def compute(corrupt=corrupt):
            try:
                return [huffman.decode(corrupt, Symbols(bits, counts))]
            except ValueError:
                return []

        assert_backends_agree(compute)


@settings(max_examples=50)
@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=256))
def test_codes_are_a_prefix_code_within_a_bit_of_the_entropy(counts):
    lengths = huffman.code_lengths(counts)
    used = [n for n in lengths if n]
    assert [n > 0 for n in lengths] == [c > 0 for c in counts]
    assert max(used, default=0) <= huffman.MAX_CODE_LENGTH
    assert sum(2.0**-n for n in used) == (1 if len(used) > 1 else len(used) / 2)
    total = sum(counts)
    if len(used) > 1:
        entropy = -sum(c / total * math.log2(c / total) for c in counts if c)
        assert entropy - 1e-9 <= sum(c * n for c, n in zip(counts, lengths, strict=True)) / total <= entropy + 1


def test_long_codes_are_limited():
    """Fibonacci frequencies make the deepest of all trees."""
    counts = [1, 1]
    while len(counts) < 40:
        counts.append(counts[-1] + counts[-2])
    lengths = huffman.code_lengths(counts)
    assert max(lengths) == huffman.MAX_CODE_LENGTH
    assert sum(2.0**-n for n in lengths) == 1


CASES = [
    (tw.QSGD(bits=4), 4, 0.05),
    (tw.QSGD(bits=3), 3, 0.15),
    (tw.QSGD(bits=8), 8, 0.05),
    (tw.NUQSGD(bits=4), 4, 0.1),
    (tw.QSGD(bits=4, bucket_size=8192, norm="l2"), 4, 0.67),  # a symbol takes one bit at least: here 0.40 would do
]


@pytest.mark.parametrize(
    ("codec", "bits", "above"), CASES, ids=lambda v: repr(v) if isinstance(v, tw.codec.Codec) else ""
)
def test_measured_bits_beside_the_entropy(codec, bits, above):
    """On Gaussian gradients: at most `above` bits more than the entropy of the symbols, table included."""
    n = 200_000
    x = torch.randn(n, generator=torch.Generator().manual_seed(0))
    coded = tw.chain(codec, tw.codec.Huffman())
    plain, payload = codec.encode(x), coded.encode(x)
    symbols = codec.symbols([n])
    stream = ((plain[plain.numel() - symbols.nbytes :][:, None] >> torch.arange(8)) & 1).flatten()[: n * bits]
    counts = torch.bincount((stream.view(n, bits).long() << torch.arange(bits)).sum(-1))
    p = counts[counts > 0].double() / n
    entropy = -(p * p.log2()).sum().item()
    measured = 8 * (payload.numel() - (plain.numel() - symbols.nbytes)) / n
    print(f"{coded}: {bits} bits, entropy {entropy:.3f}, measured {measured:.3f}")
    assert entropy <= measured <= entropy + above
    assert torch.equal(coded.decode(payload, n), codec.decode(plain, n))


def test_chain_of_three_links():
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    two = tw.chain(tw.TopK(0.01), tw.QSGD(bits=4))
    three = tw.chain(tw.TopK(0.01), tw.QSGD(bits=4), tw.codec.Huffman())
    assert repr(three) == "chain(TopK(ratio=0.01), QSGD(bits=4), Huffman())"
    assert torch.equal(three.decode(three.encode(x), len(x)), two.decode(two.encode(x), len(x)))
    assert three.encode(x).numel() < two.encode(x).numel()


@pytest.mark.parametrize("exchange", ["all_gather", "scatter_reduce"])
def test_averaging_with_payloads_of_different_sizes(exchange):
    def worker(comm, codec):
        x = torch.randn(40, 50, generator=torch.Generator().manual_seed(comm.rank)).pow(1 + 2 * comm.rank)
        averager = tw.Mean(codec, tw.ErrorFeedback(), exchange=exchange)
        state = averager.init([("x", x)], comm)
        averager.step(state, [("x", x)], comm).wait()
        return x, comm.ledger.bytes_sent

    codec = tw.QSGD(bits=4)
    coded = tw.LocalWorld(3).run(worker, tw.chain(codec, tw.codec.Huffman()))
    plain = tw.LocalWorld(3).run(worker, codec)
    for (x, sent), (y, plain_sent) in zip(coded, plain, strict=True):
        assert torch.equal(x, y)
        assert sent < plain_sent


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: tw.chain(tw.TopK(0.1), tw.codec.Huffman()), "no symbols"),
        (lambda: tw.chain(tw.QSGD(levels=2000), tw.codec.Huffman()), "no symbols"),
        (lambda: tw.chain(tw.QSGD(bits=4)), "at least two links"),
        (lambda: tw.chain(tw.TopK(0.1), tw.QSGD(bits=4), tw.Cast()), "one codec"),
        (
            lambda: tw.chain(tw.QSGD(bits=4), tw.codec.Huffman()).decode(torch.zeros(3, dtype=torch.uint8), 100),
            "more than 4",
        ),
    ],
)
def test_mistakes(build, message):
    with pytest.raises(ValueError, match=message):
        build()
