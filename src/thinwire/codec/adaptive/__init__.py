"""Codecs that adapt to the gradients: ALQ and AMQ, and the search for their levels."""

from .alq import ALQ, AMQ
from .distributions import TruncatedNormal, TruncatedNormalMixture

__all__ = ["ALQ", "AMQ", "TruncatedNormal", "TruncatedNormalMixture"]
