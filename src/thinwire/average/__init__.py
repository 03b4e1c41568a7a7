"""Averagers: how workers agree. `base` has the contract, `gossip_base` that of gossip; one algorithm, one file."""

from .base import Averager
from .by_name import ByName, ByNameState
from .choco import Choco
from .clip import Clip, ClipByNorm, ClipByValue, ClipValueByGlobalNorm
from .deepsqueeze import DeepSqueeze
from .dgc import dgc
from .dion import Dion
from .gossip_base import GossipAverager, GossipState
from .inverse_norm import InverseNorm, NormStatistics
from .mean import Mean
from .mix import Mix
from .moniqua import Moniqua
from .outer_sgd import OuterSGD
from .pairwise import Pairwise, PairwiseState
from .power_gossip import PowerGossip
from .power_sgd import PowerSGD
from .push_sum import PushSum

__all__ = [
    "Averager",
    "ByName",
    "ByNameState",
    "Choco",
    "Clip",
    "ClipByNorm",
    "ClipByValue",
    "ClipValueByGlobalNorm",
    "DeepSqueeze",
    "Dion",
    "GossipAverager",
    "GossipState",
    "InverseNorm",
    "Mean",
    "Mix",
    "Moniqua",
    "NormStatistics",
    "OuterSGD",
    "Pairwise",
    "PairwiseState",
    "PowerGossip",
    "PowerSGD",
    "PushSum",
    "dgc",
]
