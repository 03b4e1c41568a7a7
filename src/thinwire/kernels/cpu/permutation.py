"""Random subsets of indices in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import debug
from .. import _native

__all__ = ["random_indices"]


def random_indices(keys: list[int] | Tensor, counts: list[int], numels: list[int], device: torch.device) -> Tensor:
    if isinstance(keys, Tensor):
        keys = [key % 2**64 for key in keys.tolist()]
    indices = debug.empty(sum(counts), dtype=torch.int32, device="cpu")
    _native.random_indices(keys, counts, numels, indices.numpy())
    return indices.to(device)
