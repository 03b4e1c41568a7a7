"""Strategies: what is averaged, and when."""

from .consensus import ConsensusRecord, consensus
from .dgc_sgd import DGCSGD
from .gossip import gossip_parameters
from .gossip_steps import ParameterGossip
from .gradients import GradientCompression, compress_gradients, gradient_hook

__all__ = [
    "DGCSGD",
    "ConsensusRecord",
    "GradientCompression",
    "ParameterGossip",
    "compress_gradients",
    "consensus",
    "gossip_parameters",
    "gradient_hook",
]
