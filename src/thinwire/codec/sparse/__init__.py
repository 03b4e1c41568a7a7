"""Sparsifiers: few elements are sent, with their positions. `base` has what they share."""

from .base import Sparsifier
from .blockwise_top_k import BlockwiseTopK
from .coarse_grained import CoarseGrainedTopK
from .payload import SparseParts
from .random_k import RandomK
from .threshold import AdaptiveThreshold, Threshold
from .top_k import TopK

__all__ = [
    "AdaptiveThreshold",
    "CoarseGrainedTopK",
    "RandomK",
    "SparseParts",
    "Sparsifier",
    "Threshold",
    "TopK",
    "BlockwiseTopK",
]
