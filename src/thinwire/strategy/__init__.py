"""Strategies: what is averaged, and when. `strategy` has the contract of the configurations, `base` that of those at work."""

from .asynchronous import Asynchronous, AsynchronousGossip, gossip_asynchronously
from .base import Attachment, AveragerAttachment
from .consensus import ConsensusRecord, consensus
from .dgc_sgd import DGCSGD
from .gossip import Gossip, gossip_parameters
from .gossip_base import GossipAttachment
from .gossip_steps import ParameterGossip
from .gradient_compression import GradientCompression
from .gradients import Gradients, compress_gradients, gradient_hook
from .local_rounds import LocalUpdates
from .local_updates import Local, local_updates
from .methods import demo, diloco, dion, mulo_co, no_loco, sparse_loco, streaming_diloco
from .muon_adamw import MuonAdamW
from .shard_compression import ShardCompression, Shards, compress_shards
from .strategy import Averaging, Rhythm, Strategy

__all__ = [
    "DGCSGD",
    "Asynchronous",
    "AsynchronousGossip",
    "Attachment",
    "AveragerAttachment",
    "Averaging",
    "ConsensusRecord",
    "Gossip",
    "GossipAttachment",
    "GradientCompression",
    "Gradients",
    "Local",
    "LocalUpdates",
    "MuonAdamW",
    "ParameterGossip",
    "Rhythm",
    "ShardCompression",
    "Shards",
    "Strategy",
    "compress_gradients",
    "compress_shards",
    "consensus",
    "demo",
    "diloco",
    "dion",
    "gossip_asynchronously",
    "gossip_parameters",
    "gradient_hook",
    "local_updates",
    "mulo_co",
    "no_loco",
    "sparse_loco",
    "streaming_diloco",
]
