"""Codecs: what crosses the wire. `base` has the contract; one package a family, one algorithm a file."""

from .adaptive import ALQ, AMQ, TruncatedNormal, TruncatedNormalMixture
from .base import AdaptiveCodec, AgreedCodec, Codec, Key
from .compose import Huffman, Rice, chain
from .dense import SVD, Cast, Identity
from .quantize import NUQSGD, QSGD, OneBit, Quantize, SignNorm, SignSGD, TernGrad
from .sparse import AdaptiveThreshold, ChunkTopK, RandomK, Threshold, TopK, TopKInChunks

__all__ = [
    "ALQ",
    "AMQ",
    "NUQSGD",
    "QSGD",
    "SVD",
    "AdaptiveCodec",
    "AdaptiveThreshold",
    "AgreedCodec",
    "Cast",
    "ChunkTopK",
    "Codec",
    "Huffman",
    "Identity",
    "Key",
    "OneBit",
    "Quantize",
    "RandomK",
    "Rice",
    "SignNorm",
    "SignSGD",
    "TernGrad",
    "Threshold",
    "TopK",
    "TopKInChunks",
    "TruncatedNormal",
    "TruncatedNormalMixture",
    "chain",
]
