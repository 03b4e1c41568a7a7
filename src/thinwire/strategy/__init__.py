"""Strategies: what is averaged, and when."""

from .asynchronous import AsynchronousGossip, gossip_asynchronously
from .base import Strategy
from .consensus import ConsensusRecord, consensus
from .dgc_sgd import DGCSGD
from .gossip import gossip_parameters
from .gossip_base import GossipStrategy
from .gossip_steps import ParameterGossip
from .gradient_compression import GradientCompression
from .gradients import compress_gradients, gradient_hook
from .local_rounds import LocalUpdates
from .local_updates import local_updates
from .muon_adamw import MuonAdamW
from .shard_compression import ShardCompression, compress_shards

__all__ = [
    "DGCSGD",
    "AsynchronousGossip",
    "ConsensusRecord",
    "GossipStrategy",
    "GradientCompression",
    "LocalUpdates",
    "MuonAdamW",
    "ParameterGossip",
    "ShardCompression",
    "Strategy",
    "compress_gradients",
    "compress_shards",
    "consensus",
    "gossip_asynchronously",
    "gossip_parameters",
    "gradient_hook",
    "local_updates",
]
