"""Averagers: how workers agree. `base` has the contract, `gossip/base` that of gossip; one algorithm, one file."""

from .base import Averager
from .by_name import ByName
from .gossip.base import GossipAverager, GossipState
from .gossip.choco import Choco
from .gossip.clipped_gossip import ClippedGossip
from .gossip.deepsqueeze import DeepSqueeze
from .gossip.mix import Mix
from .gossip.moniqua import Moniqua
from .gossip.pairwise import Pairwise, PairwiseState
from .gossip.power_gossip import PowerGossip
from .gossip.push_sum import PushSum
from .low_rank.dion import Dion
from .low_rank.power_sgd import PowerSGD
from .mean.clip import Clip, ClipByNorm, ClipByValue, ClipValueByGlobalNorm
from .mean.dgc import dgc
from .mean.mean import Mean
from .mean.sparse import sparse
from .robust.base import Rule
from .robust.bucketing import Bucketing
from .robust.centered_clipping import CenteredClipping
from .robust.coordinates import Median, TrimmedMean
from .robust.geometric_median import GeometricMedian
from .robust.krum import Krum
from .robust.median_norm import MedianNorm

__all__ = [
    "Averager",
    "Bucketing",
    "ByName",
    "CenteredClipping",
    "Choco",
    "Clip",
    "ClippedGossip",
    "ClipByNorm",
    "ClipByValue",
    "ClipValueByGlobalNorm",
    "DeepSqueeze",
    "Dion",
    "GeometricMedian",
    "GossipAverager",
    "GossipState",
    "Krum",
    "Mean",
    "Median",
    "MedianNorm",
    "Mix",
    "Moniqua",
    "Pairwise",
    "PairwiseState",
    "PowerGossip",
    "PowerSGD",
    "PushSum",
    "Rule",
    "TrimmedMean",
    "dgc",
    "sparse",
]
