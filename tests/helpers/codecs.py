"""The codecs that tests of all codecs run over."""

from __future__ import annotations

import pytest

import thinwire as tw

CODECS = [
    tw.codec.Identity(),
    tw.Cast("bfloat16"),
    tw.Cast("float16"),
    tw.TopK(0.3),
    tw.TopK(0.01),
    tw.TopK(1.0),
    tw.TopK(0.05, indices="auto"),
    tw.TopK(0.05, sample=0.2),
    tw.TopK(0.3, sample=0.5, indices="auto"),
    tw.codec.BlockwiseTopK(0.1, block=64),
    tw.codec.BlockwiseTopK(0.0005),
    tw.codec.CoarseGrainedTopK(0.3, chunk=32),
    tw.Threshold(1.0),
    tw.Threshold(1e-30),
    tw.AdaptiveThreshold(),
    tw.RandomK(0.1, shared=True),
    tw.RandomK(0.1),
    tw.RandomK(0.7, scaled=True),
    tw.QSGD(bits=4),
    tw.QSGD(bits=1, zero=False, bucket_size=7),
    tw.QSGD(bits=3, bucket_size=100, norm="l2"),
    tw.QSGD(bits=8, bucket_size=16384, zero=False),
    tw.QSGD(levels=255, bucket_size=4096, norm="l2"),
    tw.QSGD(levels=2000),
    tw.QSGD(levels=255, bucket_size=None, norm="l2"),
    tw.codec.DenseLast(tw.QSGD(bits=5, bucket_size=64)),
    tw.codec.DenseLast(tw.ALQ(bucket_size=100)),
    tw.codec.Quantize(levels=(-1.0, -0.5, -0.25, 0.25, 0.5, 1.0)),
    tw.codec.Quantize(levels=tuple(i / 10 for i in range(-10, 11)), bucket_size=100, norm="l2"),
    tw.NUQSGD(bits=3),
    tw.NUQSGD(bits=3, bucket_size=100, zero=False),
    tw.ALQ(),
    tw.ALQ(bits=4, bucket_size=100, norm="max", zero=True),
    tw.AMQ(bits=2, multiplier=0.3),
    tw.chain(tw.TopK(0.05), tw.QSGD(bits=4)),
    tw.chain(tw.TopK(0.2), tw.ALQ(bucket_size=64)),
    tw.chain(tw.QSGD(bits=4), tw.codec.Huffman()),
    tw.chain(tw.AMQ(), tw.codec.Huffman()),
    tw.TernGrad(),
    tw.TernGrad(clip=None, bucket_size=100),
    tw.TernGrad(shared=True),
    tw.codec.OneBit(),
    tw.codec.OneBit(bucket_size=30),
    tw.SignSGD(),
    tw.SignSGD(scale=0.25),
    tw.Cast("float8_e4m3fn"),
    tw.Cast("float8_e5m2"),
    tw.chain(tw.TopK(0.05), tw.QSGD(bits=4), tw.codec.Huffman()),
    tw.chain(tw.TernGrad(), tw.codec.Huffman()),
    tw.codec.SignNorm(),
    tw.codec.BinMeans(),
    tw.codec.BinMeans(bits=3, bucket_size=100),
    tw.codec.Float4(),
    tw.codec.Float4("e2m1", bucket_size=100),
    tw.codec.NaturalCompression(),
    tw.codec.Dynamic8(),
    tw.codec.Dynamic8(bucket_size=100, norm="l2"),
    tw.chain(tw.codec.Tiles(8), tw.codec.BlockwiseTopK(0.1, block=64), tw.codec.BinMeans()),
    tw.chain(tw.codec.DCT(8), tw.codec.BlockwiseTopK(0.1, block=64)),
    tw.chain(tw.codec.Tiles(20, divisors=True), tw.codec.BlockwiseTopK(0.01, block=400), tw.codec.BinMeans()),
    tw.chain(tw.codec.DCT(20, divisors=True), tw.codec.BlockwiseTopK(0.01, block=400)),
    tw.codec.SVD(rank=1),
    tw.codec.SVD(rank=5),
    tw.codec.LowRank(rank=1),
    tw.codec.LowRank(rank=4, values=tw.QSGD(bits=4)),
    tw.chain(tw.TopK(0.05), tw.codec.Rice()),
    tw.chain(tw.Threshold(1.0), tw.codec.Rice()),
    tw.chain(tw.TopK(0.3), tw.QSGD(bits=4), tw.codec.Rice()),
    tw.chain(tw.TopK(0.05, sample=0.2), tw.QSGD(bits=4), tw.codec.Huffman(), tw.codec.Rice()),
    tw.chain(tw.TopK(0.2), tw.codec.SignNorm()),
    tw.chain(tw.TopK(0.2), tw.Cast()),
    tw.chain(tw.Threshold(0.5), tw.QSGD(bits=4)),
    tw.chain(tw.codec.BlockwiseTopK(0.1, block=100), tw.QSGD(bits=4, bucket_size=7)),
    tw.chain(tw.RandomK(0.2, shared=True), tw.Cast()),
    tw.chain(tw.RandomK(0.2, scaled=True), tw.QSGD(bits=8)),
]

ONE_OF_EACH = list({type(codec): codec for codec in reversed(CODECS)}.values())[::-1]
"""The first codec of each class: the whole conformance suite runs over these, and its quick checks over all."""

every_codec = pytest.mark.parametrize("codec", CODECS, ids=repr)


def gossiped() -> list[tw.codec.Codec]:
    """Those that gossip averagers take: of fixed size, and without an agreement or a key of all workers."""
    return [
        codec
        for codec in CODECS
        if codec.traits.fixed_size
        and codec.traits.agreement is None
        and codec.traits.adaptive is None
        and not codec.traits.shared_key
    ]
