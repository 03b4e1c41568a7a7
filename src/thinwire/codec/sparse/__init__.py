"""Sparsifiers: few elements are sent, with their positions. `base` has what they share."""

from .base import Selection, Sparsifier
from .blockwise_top_k import TopKInChunks
from .coarse_grained import ChunkTopK
from .random_k import RandomK
from .threshold import AdaptiveThreshold, Threshold
from .top_k import TopK

__all__ = ["AdaptiveThreshold", "ChunkTopK", "RandomK", "Selection", "Sparsifier", "Threshold", "TopK", "TopKInChunks"]
