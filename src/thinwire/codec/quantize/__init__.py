"""Quantizers: every element is sent, rounded to one of few levels."""

from .bin_means import BinMeans
from .float4 import Float4
from .levels import NUQSGD, Quantize
from .qsgd import QSGD
from .sign import OneBit, SignNorm, SignSGD
from .ternary import TernGrad

__all__ = ["BinMeans", "Float4", "NUQSGD", "OneBit", "QSGD", "Quantize", "SignNorm", "SignSGD", "TernGrad"]
