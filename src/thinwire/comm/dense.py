"""The collectives of FSDP as they are, for modules whose communication is no longer encoded."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

# Before PyTorch 2.13 they had other names, which are deprecated now.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_shards(output: Tensor, shard: Tensor, group: dist.ProcessGroup, async_op: bool) -> Any:
    """Gather the shards of all workers of `group`, in rank order, into `output`."""
    return _all_gather(output, shard, group=group, async_op=async_op)


def reduce_scatter_shards(output: Tensor, whole: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool) -> Any:
    """Reduce `whole` over all workers of `group`; `output` gets this worker's shard."""
    return _reduce_scatter(output, whole, group=group, op=op, async_op=async_op)
