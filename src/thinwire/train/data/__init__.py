"""Data sets: one file each, and how their examples are dealt out to workers."""

from .digits import Digits
from .shards import Split, num_batches, shard, uneven_shard

__all__ = ["Digits", "Split", "num_batches", "shard", "uneven_shard"]
