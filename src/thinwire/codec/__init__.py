"""Codecs: what crosses the wire. `base` has the contract, each package a family, each file one algorithm."""

from .adaptive import ALQ, AMQ, AdaptiveCodec, Fitted, TruncatedNormal, TruncatedNormalMixture
from .agreed import AgreedCodec
from .base import Codec
from .compose import DCT, DenseLast, Huffman, Rice, Tiles, Transform, chain
from .dense import SVD, Cast, Identity
from .quantize import (
    NUQSGD,
    QSGD,
    BinMeans,
    Dynamic8,
    Float4,
    NaturalCompression,
    OneBit,
    Quantize,
    SignNorm,
    SignSGD,
    TernGrad,
)
from .sparse import AdaptiveThreshold, BlockwiseTopK, CoarseGrainedTopK, RandomK, SparseParts, Threshold, TopK
from .traits import Traits
from .types import Key, Selection, Symbols

__all__ = [
    "ALQ",
    "AMQ",
    "NUQSGD",
    "NaturalCompression",
    "QSGD",
    "SVD",
    "Selection",
    "Symbols",
    "AdaptiveCodec",
    "AdaptiveThreshold",
    "AgreedCodec",
    "Cast",
    "CoarseGrainedTopK",
    "Codec",
    "DenseLast",
    "Dynamic8",
    "Fitted",
    "Huffman",
    "Identity",
    "Key",
    "OneBit",
    "Quantize",
    "RandomK",
    "Rice",
    "SignNorm",
    "SignSGD",
    "SparseParts",
    "TernGrad",
    "Threshold",
    "TopK",
    "Traits",
    "BlockwiseTopK",
    "TruncatedNormal",
    "TruncatedNormalMixture",
    "DCT",
    "Tiles",
    "Transform",
    "BinMeans",
    "Float4",
    "chain",
]
