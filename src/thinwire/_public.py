"""The names that a user composes first, in the order of a gradient's path.

A strategy hands tensors to an averager. Its memory and codec make them small, and its communicator sends them.
All other names are public in their package, such as `tw.codec.Dynamic8`, and `parse` knows all algorithms by name.
`thinwire/__init__.py` imports this module when one of the names is first used.
"""

from . import average, codec, comm, memory, schedule, strategy, topology
from .attaching import attach
from .average import (
    ByName,
    Choco,
    DeepSqueeze,
    Mean,
    Mix,
    Moniqua,
    Pairwise,
    PowerGossip,
    PowerSGD,
    PushSum,
    dgc,
    sparse,
)
from .codec import (
    ALQ,
    AMQ,
    NUQSGD,
    QSGD,
    AdaptiveThreshold,
    Cast,
    Fitted,
    RandomK,
    SignSGD,
    TernGrad,
    Threshold,
    TopK,
    chain,
)
from .comm import Credentials, LocalWorld
from .memory import ErrorFeedback, MomentumCorrection
from .notation import parse
from .sampler import ElasticSampler
from .strategy import (
    Asynchronous,
    Gossip,
    Gradients,
    Local,
    OuterSGD,
    Shards,
    compress_gradients,
    compress_shards,
    consensus,
    diloco,
    gossip_asynchronously,
    gossip_parameters,
    local_updates,
    mulo_co,
    sparse_loco,
    streaming_diloco,
)
from .topology import Complete, Exponential, Ring

__all__ = [
    # strategies
    "attach",
    "Gradients",
    "Gossip",
    "Asynchronous",
    "Local",
    "Shards",
    "compress_gradients",
    "compress_shards",
    "gossip_parameters",
    "gossip_asynchronously",
    "local_updates",
    "ElasticSampler",
    "OuterSGD",
    "diloco",
    "streaming_diloco",
    "sparse_loco",
    "mulo_co",
    "consensus",
    # averagers
    "Mean",
    "ByName",
    "PowerSGD",
    "dgc",
    "sparse",
    "Mix",
    "PushSum",
    "Choco",
    "DeepSqueeze",
    "PowerGossip",
    "Moniqua",
    "Pairwise",
    # memory
    "ErrorFeedback",
    "MomentumCorrection",
    # codecs
    "Cast",
    "TopK",
    "RandomK",
    "Threshold",
    "AdaptiveThreshold",
    "QSGD",
    "NUQSGD",
    "ALQ",
    "AMQ",
    "Fitted",
    "TernGrad",
    "SignSGD",
    "chain",
    # topologies
    "Ring",
    "Complete",
    "Exponential",
    # communication
    "LocalWorld",
    "Credentials",
    # notation
    "parse",
    # packages
    "average",
    "codec",
    "comm",
    "memory",
    "schedule",
    "strategy",
    "topology",
]
