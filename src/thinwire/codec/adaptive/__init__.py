"""Codecs that adapt to the gradients: ALQ and AMQ with the search for their levels, and Fitted with its choices."""

from .alq import ALQ, AMQ
from .base import AdaptiveCodec
from .distributions import TruncatedNormal, TruncatedNormalMixture
from .fitted import Fitted

__all__ = ["AdaptiveCodec", "ALQ", "AMQ", "Fitted", "TruncatedNormal", "TruncatedNormalMixture"]
