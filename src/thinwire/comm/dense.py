"""Collectives of PyTorch that nothing encodes, by one name in all its versions: FSDP's own, and NCCL's all-gather."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

# Before PyTorch 2.13 they had other names, which are deprecated now.
gather_shards: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""`gather_shards(output, shard, group=...)` gathers the shards of all workers, in rank order, into `output`."""
reduce_scatter_shards: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""`reduce_scatter_shards(output, whole, group=...)` reduces `whole` over all workers; `output` gets this worker's shard."""
