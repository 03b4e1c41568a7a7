"""The public names, in the order of a gradient's path.

A strategy hands tensors to an averager. Its memory and codec make them small, and its communicator sends them.
This is the only list of the names. `thinwire/__init__.py` imports this module when one of them is first used.
"""

from . import average, codec, comm, memory, schedule, strategy, topology
from .average import (
    Averager,
    ByName,
    Choco,
    ClipByNorm,
    ClipByValue,
    ClipValueByGlobalNorm,
    DeepSqueeze,
    InverseNorm,
    Mean,
    Mix,
    Moniqua,
    OuterSGD,
    Pairwise,
    PowerGossip,
    PowerSGD,
    PushSum,
    dgc,
)
from .codec import (
    ALQ,
    AMQ,
    NUQSGD,
    QSGD,
    SVD,
    AdaptiveThreshold,
    BlockwiseTopK,
    Cast,
    CoarseGrainedTopK,
    Codec,
    DenseLast,
    Huffman,
    Identity,
    OneBit,
    Quantize,
    RandomK,
    Rice,
    SignNorm,
    SignSGD,
    TernGrad,
    Threshold,
    TopK,
    chain,
)
from .comm import LocalWorld
from .memory import EF21, ErrorFeedback, Memory, MomentumCorrection
from .notation import parse, register
from .schedule import GeometricWarmup, Schedule, Values
from .strategy import (
    DGCSGD,
    compress_gradients,
    consensus,
    gossip_asynchronously,
    gossip_parameters,
    gradient_hook,
    local_updates,
)
from .topology import (
    Complete,
    DirectedRing,
    Exponential,
    Hypercube,
    Ring,
    Star,
    Topology,
    Torus,
)

__all__ = [
    # strategies
    "compress_gradients",
    "gradient_hook",
    "DGCSGD",
    "gossip_parameters",
    "gossip_asynchronously",
    "local_updates",
    "OuterSGD",
    "InverseNorm",
    "consensus",
    # averagers
    "Averager",
    "Mean",
    "ByName",
    "PowerSGD",
    "dgc",
    "Mix",
    "PushSum",
    "Choco",
    "DeepSqueeze",
    "PowerGossip",
    "Moniqua",
    "Pairwise",
    # memory
    "Memory",
    "ErrorFeedback",
    "EF21",
    "MomentumCorrection",
    "ClipByNorm",
    "ClipByValue",
    "ClipValueByGlobalNorm",
    # codecs
    "Codec",
    "Identity",
    "Cast",
    "TopK",
    "BlockwiseTopK",
    "CoarseGrainedTopK",
    "RandomK",
    "Threshold",
    "AdaptiveThreshold",
    "QSGD",
    "Quantize",
    "NUQSGD",
    "ALQ",
    "AMQ",
    "TernGrad",
    "SignSGD",
    "OneBit",
    "DenseLast",
    "Huffman",
    "Rice",
    "SignNorm",
    "SVD",
    "chain",
    # schedules
    "Schedule",
    "GeometricWarmup",
    "Values",
    # topologies
    "Topology",
    "Ring",
    "DirectedRing",
    "Torus",
    "Hypercube",
    "Star",
    "Complete",
    "Exponential",
    # communication
    "LocalWorld",
    # notation
    "parse",
    "register",
    # packages
    "average",
    "codec",
    "comm",
    "memory",
    "schedule",
    "strategy",
    "topology",
]
