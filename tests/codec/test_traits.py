"""Every combinator around every codec: it carries what the codec demands, or refuses it when it is built."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
from helpers.codecs import ONE_OF_EACH

import thinwire as tw
from thinwire import kernels
from thinwire.codec.traits import DEMANDS
from thinwire.membership import State
from thinwire.testing import check_traits

NUMEL = 512


class Bytes(tw.codec.Codec):
    """The base of codecs of one byte an element: the float of element i is `values(bytes, key)`."""

    def symbols(self, numels):
        return tw.codec.Symbols(8, numels)

    def encode_segments(self, segments, keys, residuals):
        codes = [self.codes(x, key) for x, key in zip(segments, keys, strict=True)]
        for i, r in enumerate(residuals or []):
            r.copy_(segments[i] - self.values(codes[i], keys[i]).view(segments[i].shape))
        return torch.cat(codes)

    def decode_add_segments(self, payload, outs, weight, keys):
        assert bool(keys) == self.traits.shared_key, "keys come to those with a shared key alone"
        for out, codes, key in zip(
            outs, payload.split([o.numel() for o in outs]), keys or [0] * len(outs), strict=True
        ):
            out.add_(self.values(codes, key).view(out.shape), alpha=weight)

    def segments_nbytes(self, sizes):
        return sum(n if isinstance(n, int) else n.numel() for n in sizes)


@dataclass(frozen=True, repr=False)
class Dithered(Bytes):
    """Integers, rounded after a number is added that the receiver subtracts again: subtractive dither."""

    traits = tw.codec.Traits(shared_key=True, unbiased=True)

    def codes(self, x, key):
        return (x * 8 + kernels.uniform(key, x.numel(), x.device) + 128).floor().clamp(0, 255).to(torch.uint8)

    def values(self, codes, key):
        return (codes.float() - 127.5 - kernels.uniform(key, codes.numel(), codes.device)) / 8


@dataclass(frozen=True, repr=False)
class ByteVote(Bytes):
    """Signs, as bytes, for a vote."""

    traits = tw.codec.Traits(votes=True)

    def codes(self, x, key):
        return (x.sign() + 1).to(torch.uint8)

    def values(self, codes, key):
        return codes.float() - 1

    def combine(self, totals):
        torch._foreach_sign_(totals)


@dataclass(frozen=True, repr=False)
class ByColumns(Bytes):
    """Integers, column after column."""

    traits = tw.codec.Traits(needs_shape=True, bucket_size=1)

    def codes(self, x, key):
        return (x.t() if x.ndim == 2 else x).reshape(-1).mul(8).add(128).round().clamp(0, 255).to(torch.uint8)

    def values(self, codes, key):
        return (codes.float() - 128) / 8


@dataclass
class NothingLearned(State):
    """A state without fields."""


@dataclass(frozen=True, repr=False)
class Learning(tw.codec.AdaptiveCodec):
    """An adaptive codec that never learns."""

    pure: tw.codec.Codec = field(default_factory=lambda: tw.QSGD(bits=4))

    def init_state(self, shapes=None):
        return NothingLearned()

    def at(self, state):
        return self.pure

    def observes(self, step):
        return False

    def observe(self, state, segments, keys):
        raise AssertionError("observes nothing")

    def is_due(self, state, step):
        return False

    statistics = learn = update = observe


DEMANDING = [Dithered(), ByteVote(), ByColumns(), Learning(), tw.TernGrad(shared=True)]
LINKS = [*DEMANDING, *ONE_OF_EACH]
# Combinators that change nothing for a vector of NUMEL elements in one bucket, and what they carry.
WRAPPED = {
    "top-k of everything": (lambda codec: tw.chain(tw.TopK(1.0), codec), {"shared_key", "votes", "adaptive"}),
    "entropy coder": (lambda codec: tw.chain(codec, tw.codec.Huffman()), {"shared_key", "votes", "adaptive"}),
    "tiles": (lambda codec: tw.chain(tw.codec.Tiles(NUMEL), codec), {"shared_key"}),
    "dense last": (tw.codec.DenseLast, {"shared_key", "adaptive"}),
}


def demands_of(codec):
    return {name for name in DEMANDS if getattr(codec.traits, name)}


@cache  # each codec is wrapped by several combinators
def mean(codec, scale):
    """The mean of four workers, whose weights are exact, by an all-gather of gradients that come multiplied by `scale`."""

    def worker(comm):
        x = torch.randn(NUMEL, generator=torch.Generator().manual_seed(comm.rank)) * scale
        x[7:20] = 0
        averager = tw.Mean(codec, exchange="all_gather", min_ndim=0)
        state = averager.init([("x", x)], comm, seed=5)
        averager.step(state, [("x", x)], comm, scale).wait()
        return x

    results = tw.LocalWorld(4).run(worker)
    assert all(torch.equal(x, results[0]) for x in results)
    return results[0]


@pytest.mark.parametrize("combinator", WRAPPED)
@pytest.mark.parametrize("codec", LINKS, ids=repr)
def test_a_combinator_that_changes_nothing_gives_what_its_codec_gives(combinator, codec):
    build, carries = WRAPPED[combinator]
    try:
        wrapped = build(codec)
    except ValueError as error:
        assert repr(codec) in str(error) or "chain" in str(error), f"the error names nothing: {error}"
        return
    refused = demands_of(codec) - carries
    assert not refused, f"{wrapped} carries no {refused}"
    assert demands_of(codec) <= demands_of(wrapped)
    for scale in (1.0, 1024.0):
        if combinator != "dense last" or NUMEL % codec.traits.bucket_size == 0:
            assert torch.equal(mean(wrapped, scale), mean(codec, scale))


@pytest.mark.parametrize("combinator", WRAPPED)
def test_a_combinator_refuses_what_it_does_not_carry_by_name(combinator):
    build, carries = WRAPPED[combinator]
    for codec in DEMANDING:
        fits = combinator != "dense last" or codec.traits.bucket_size is not None
        if fits and demands_of(codec) - carries:
            (demand,) = demands_of(codec)
            with pytest.raises(
                ValueError, match=f"{type(codec).__name__}.* {DEMANDS[demand]}, which is not possible here"
            ):
                build(codec)


def test_all_pairs_of_links():
    """Each pair is a codec whose traits hold, or is refused with an error that says what stands wrong."""
    built = 0
    links = [*LINKS, tw.codec.Huffman(), tw.codec.Rice(), tw.codec.Tiles(8), tw.codec.DCT(8)]
    for first, second in itertools.product(links, repeat=2):
        try:
            codec = tw.chain(first, second)
        except ValueError as error:
            assert "chain" in str(error) or "which" in str(error), f"{first}, {second}: {error}"
            continue
        parts = [link for link in (first, second) if isinstance(link, tw.codec.Codec)]
        demanded = set().union(*map(demands_of, parts))
        assert demanded <= demands_of(codec), f"{codec} lost {demanded - demands_of(codec)}"
        check_traits(codec)
        built += 1
    assert built > 170


def test_a_chain_votes():
    """The faults that made traits: signs were averaged, and divided by the loss scale."""
    for scale in (1.0, 1024.0):
        assert torch.equal(mean(tw.chain(tw.TopK(1.0), tw.SignSGD()), scale), mean(tw.SignSGD(), scale))
        assert mean(tw.chain(tw.TopK(1.0), tw.SignSGD()), scale).abs().max() == scale


def test_terngrad_in_a_chain_is_told_of_its_agreement():
    for build in (
        lambda codec: tw.chain(tw.TopK(0.1), codec),
        lambda codec: tw.chain(codec, tw.codec.Huffman()),
        lambda codec: tw.chain(tw.TopK(0.1), codec, tw.codec.Huffman()),
    ):
        with pytest.raises(ValueError, match=r"TernGrad\(shared=True\) lets workers agree on numbers"):
            build(tw.TernGrad(shared=True))


def test_the_values_of_a_chain_get_its_shared_key():
    codec, x, key = tw.chain(tw.TopK(0.1), Dithered()), torch.randn(NUMEL), tw.codec.Key(seed=1)
    residual = torch.empty(NUMEL)
    decoded = codec.decode(codec.encode(x, key, residual), NUMEL, key)
    assert codec.traits.shared_key and torch.equal(residual, x - decoded)
    assert (decoded - x)[decoded != 0].abs().max() <= 1 / 16  # half a step of the quantizer


def test_votes_are_not_added_by_owners():
    with pytest.raises(ValueError, match="a sparse all-reduce adds coordinates"):
        tw.Mean(tw.chain(tw.TopK(0.1), tw.SignSGD()), tw.ErrorFeedback(), exchange="sparse_reduce")
