"""Codecs: what crosses the wire. `base` has the contract, each package a family, each file one algorithm."""

from .adaptive.alq import ALQ, AMQ
from .adaptive.base import AdaptiveCodec
from .adaptive.fitted import Fitted
from .agreed_codec import AgreedCodec
from .base import Codec
from .compose.chain import chain
from .compose.dense_last import DenseLast
from .compose.huffman import Huffman
from .compose.rice import Rice
from .compose.transform import DCT, Tiles, Transform
from .dense.cast import Cast, Identity
from .dense.low_rank import LowRank
from .dense.svd import SVD
from .quantize.bin_means import BinMeans
from .quantize.dynamic8 import Dynamic8
from .quantize.float4 import Float4
from .quantize.levels import NUQSGD, Quantize
from .quantize.natural import NaturalCompression
from .quantize.qsgd import QSGD
from .quantize.sign import OneBit, SignNorm, SignSGD
from .quantize.ternary import TernGrad
from .sparse.blockwise_top_k import BlockwiseTopK
from .sparse.coarse_grained import CoarseGrainedTopK
from .sparse.payload import SparseParts
from .sparse.random_k import RandomK
from .sparse.threshold import AdaptiveThreshold, Threshold
from .sparse.top_k import TopK
from .traits import Traits
from .types import Key, Selection, Symbols

__all__ = [
    "ALQ",
    "AMQ",
    "NUQSGD",
    "NaturalCompression",
    "QSGD",
    "LowRank",
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
    "DCT",
    "Tiles",
    "Transform",
    "BinMeans",
    "Float4",
    "chain",
]
