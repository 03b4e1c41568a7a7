"""Quantizers: every element is sent, rounded to one of few levels."""

from .levels import NUQSGD, Quantize
from .qsgd import QSGD
from .sign import OneBit, SignNorm, SignSGD
from .ternary import TernGrad

__all__ = ["NUQSGD", "OneBit", "QSGD", "Quantize", "SignNorm", "SignSGD", "TernGrad"]
