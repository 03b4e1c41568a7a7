"""The collectives of FSDP as they are, for modules whose communication is no longer encoded."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor


def gather_shards(output: Tensor, shard: Tensor, group: dist.ProcessGroup, async_op: bool) -> Any:
    """Gather the shards of all workers of `group`, in rank order, into `output`."""
    return dist.all_gather_single(output, shard, group=group, async_op=async_op)


def reduce_scatter_shards(output: Tensor, whole: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool) -> Any:
    """Reduce `whole` over all workers of `group`; `output` gets this worker's shard."""
    return dist.reduce_scatter_single(output, whole, group=group, op=op, async_op=async_op)
