"""What the rounds of `Local` do with tensors: anchors, exact means."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ...comm import Communicator
from ..model.joined import exchange_joined
from ..model.shards import local


def anchor_of(p: Tensor) -> nn.Parameter:
    """A copy in float32 at least, so that small outer steps are not lost."""
    wide = torch.promote_types(p.dtype, torch.float32)
    return nn.Parameter(p.to(wide, copy=True, memory_format=torch.contiguous_format))


def average_exactly(tensors: Sequence[Tensor], comm: Communicator) -> None:
    """Replace tensors by their mean over all workers, in place, whatever their layout in memory."""
    exchange_joined([local(t) for t in tensors], comm.all_reduce, lambda t, total: t.copy_(total.div_(comm.size)))
