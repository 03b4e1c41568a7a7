"""Quantizers: every element is sent, rounded to one of few levels."""

from .bin_means import BinMeans
from .dynamic8 import Dynamic8
from .float4 import Float4
from .levels import NUQSGD, Quantize
from .natural import NaturalCompression
from .qsgd import QSGD
from .sign import OneBit, SignNorm, SignSGD
from .ternary import TernGrad

__all__ = [
    "BinMeans",
    "Dynamic8",
    "Float4",
    "NUQSGD",
    "NaturalCompression",
    "OneBit",
    "QSGD",
    "Quantize",
    "SignNorm",
    "SignSGD",
    "TernGrad",
]
