"""Codecs: what crosses the wire. `base` has the contract; one family, one file."""

from .adaptive import ALQ, AMQ
from .base import AdaptiveCodec, AgreedCodec, Codec, Key
from .cast import Cast, Identity
from .chain import chain
from .chunk_top_k import ChunkTopK
from .distributions import TruncatedNormal, TruncatedNormalMixture
from .entropy import Huffman
from .gaps import Rice
from .levels import NUQSGD, Quantize
from .lowrank import SVD
from .quantize import QSGD
from .random_k import RandomK
from .sign import OneBit, SignNorm, SignSGD
from .ternary import TernGrad
from .threshold import AdaptiveThreshold, Threshold
from .top_k import TopK
from .top_k_in_chunks import TopKInChunks

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
