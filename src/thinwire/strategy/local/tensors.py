"""What the rounds of `Local` do with tensors: anchors, exact means, names in states of optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...algorithm import require
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


def renamed(saved: dict[str, Any], names: dict[Any, Any]) -> dict[str, Any]:
    """An optimizer's state_dict with other names for its parameters: names for numbers, or numbers for names."""
    unknown = sorted(str(key) for group in saved["param_groups"] for key in group["params"] if key not in names)
    require(not unknown, f"saved outer optimizer does not fit this one: it has {unknown[:5]}")
    groups = [{**group, "params": [names[key] for key in group["params"]]} for group in saved["param_groups"]]
    return {"state": {names[key]: value for key, value in saved["state"].items()}, "param_groups": groups}
