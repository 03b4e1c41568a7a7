"""Codecs that adapt to the gradients: ALQ and AMQ, and the search for their levels."""

from .alq import ALQ, AMQ
from .base import AdaptiveCodec
from .distributions import TruncatedNormal, TruncatedNormalMixture

__all__ = ["AdaptiveCodec", "ALQ", "AMQ", "TruncatedNormal", "TruncatedNormalMixture"]
