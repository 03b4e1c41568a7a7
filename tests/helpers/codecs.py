"""The codecs that the conformance suite runs over."""

from __future__ import annotations

import pytest

import thinwire as tw

CODECS = [
    tw.Identity(),
    tw.Cast("bfloat16"),
    tw.Cast("float16"),
    tw.TopK(0.01),
    tw.TopK(0.3),
    tw.TopK(1.0),
    tw.TopK(0.05, indices="auto"),
    tw.TopK(0.05, sample=0.2),
    tw.TopK(0.3, sample=0.5, indices="auto"),
    tw.BlockwiseTopK(0.1, block=64),
    tw.BlockwiseTopK(0.0005),
    tw.CoarseGrainedTopK(0.3, chunk=32),
    tw.Threshold(1.0),
    tw.Threshold(1e-30),
    tw.AdaptiveThreshold(),
    tw.RandomK(0.1),
    tw.RandomK(0.7, scaled=True),
    tw.RandomK(0.1, shared=True),
    tw.QSGD(bits=4),
    tw.QSGD(bits=1, zero=False, bucket_size=7),
    tw.QSGD(bits=3, bucket_size=100, norm="l2"),
    tw.QSGD(bits=8, bucket_size=16384, zero=False),
    tw.QSGD(levels=255, bucket_size=4096, norm="l2"),
    tw.QSGD(levels=2000),
    tw.QSGD(levels=255, bucket_size=None, norm="l2"),
    tw.DenseLast(tw.QSGD(bits=5, bucket_size=64)),
    tw.DenseLast(tw.ALQ(bucket_size=100)),
    tw.Quantize(levels=(-1.0, -0.5, -0.25, 0.25, 0.5, 1.0)),
    tw.Quantize(levels=tuple(i / 10 for i in range(-10, 11)), bucket_size=100, norm="l2"),
    tw.NUQSGD(bits=3),
    tw.NUQSGD(bits=3, bucket_size=100, zero=False),
    tw.ALQ(),
    tw.ALQ(bits=4, bucket_size=100, norm="max", zero=True),
    tw.AMQ(bits=2, multiplier=0.3),
    tw.chain(tw.TopK(0.2), tw.ALQ(bucket_size=64)),
    tw.chain(tw.AMQ(), tw.Huffman()),
    tw.TernGrad(),
    tw.TernGrad(clip=None, bucket_size=100),
    tw.TernGrad(shared=True),
    tw.OneBit(),
    tw.OneBit(bucket_size=30),
    tw.SignSGD(),
    tw.SignSGD(scale=0.25),
    tw.Cast("float8_e4m3fn"),
    tw.Cast("float8_e5m2"),
    tw.chain(tw.QSGD(bits=4), tw.Huffman()),
    tw.chain(tw.TopK(0.05), tw.QSGD(bits=4), tw.Huffman()),
    tw.chain(tw.TernGrad(), tw.Huffman()),
    tw.SignNorm(),
    tw.BinMeans(),
    tw.BinMeans(bits=3, bucket_size=100),
    tw.Float4(),
    tw.Float4("e2m1", bucket_size=100),
    tw.NaturalCompression(),
    tw.Dynamic8(),
    tw.Dynamic8(bucket_size=100, norm="l2"),
    tw.chain(tw.Tiles(8), tw.BlockwiseTopK(0.1, block=64), tw.BinMeans()),
    tw.chain(tw.DCT(8), tw.BlockwiseTopK(0.1, block=64)),
    tw.SVD(rank=1),
    tw.SVD(rank=5),
    tw.chain(tw.TopK(0.05), tw.QSGD(bits=4)),
    tw.chain(tw.TopK(0.05), tw.Rice()),
    tw.chain(tw.Threshold(1.0), tw.Rice()),
    tw.chain(tw.TopK(0.3), tw.QSGD(bits=4), tw.Rice()),
    tw.chain(tw.TopK(0.05, sample=0.2), tw.QSGD(bits=4), tw.Huffman(), tw.Rice()),
    tw.chain(tw.TopK(0.2), tw.SignNorm()),
    tw.chain(tw.TopK(0.2), tw.Cast()),
    tw.chain(tw.Threshold(0.5), tw.QSGD(bits=4)),
    tw.chain(tw.BlockwiseTopK(0.1, block=100), tw.QSGD(bits=4, bucket_size=7)),
    tw.chain(tw.RandomK(0.2, shared=True), tw.Cast()),
    tw.chain(tw.RandomK(0.2, scaled=True), tw.QSGD(bits=8)),
]

every_codec = pytest.mark.parametrize("codec", CODECS, ids=repr)


def gossiped() -> list[tw.Codec]:
    """Those that gossip averagers take: of fixed size, and without an agreement of all workers."""
    return [codec for codec in CODECS if codec.fixed_size and codec.agreement is None and codec.adaptive_part is None]
