"""Strategies: what is averaged, and when."""

from .consensus import ConsensusRecord, consensus
from .dgc_sgd import DGCSGD
from .gradients import GradientCompression, compress_gradients, gradient_hook

__all__ = ["DGCSGD", "ConsensusRecord", "GradientCompression", "compress_gradients", "consensus", "gradient_hook"]
