"""Strategies: what is averaged, and when. `strategy` has the contract of the configurations, `base` that of those at work."""

from .base import Attachment, AveragerAttachment
from .consensus import ConsensusRecord, consensus
from .gossip.asynchronous import Asynchronous, AsynchronousGossip, gossip_asynchronously
from .gossip.gossip import Gossip, gossip_parameters
from .gossip.steps import ParameterGossip
from .gradients.compression import GradientCompression
from .gradients.dgc_sgd import DGCSGD
from .gradients.gradients import Gradients, compress_gradients, gradient_hook
from .gradients.shard_compression import ShardCompression, Shards, compress_shards
from .local.inverse_norm import InverseNorm, NormStatistics
from .local.local import Local, local_updates
from .local.muon_adamw import MuonAdamW
from .local.outer_sgd import OuterSGD
from .local.quorum import Quorum
from .local.rounds import LocalUpdates
from .local.staleness import CosineGate, DelayedNesterov, Drop, PlainWeights, Staleness
from .methods import asynchronous_diloco, demo, diloco, dion, mulo_co, no_loco, sparse_loco, streaming_diloco
from .own_model import OwnModelAttachment
from .strategy import Averaging, Rhythm, Strategy
from .told import attach_together

__all__ = [
    "DGCSGD",
    "Asynchronous",
    "AsynchronousGossip",
    "Attachment",
    "AveragerAttachment",
    "Averaging",
    "ConsensusRecord",
    "CosineGate",
    "DelayedNesterov",
    "Drop",
    "Gossip",
    "GradientCompression",
    "Gradients",
    "InverseNorm",
    "Local",
    "LocalUpdates",
    "MuonAdamW",
    "NormStatistics",
    "OuterSGD",
    "OwnModelAttachment",
    "ParameterGossip",
    "PlainWeights",
    "Quorum",
    "Rhythm",
    "ShardCompression",
    "Shards",
    "Staleness",
    "Strategy",
    "asynchronous_diloco",
    "attach_together",
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
