"""Uniform random numbers in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import debug
from .. import _native

__all__ = ["uniform"]


def uniform(key: int, numel: int, device: torch.device) -> Tensor:
    out = debug.empty(numel, device="cpu")
    _native.uniform(key, out.numpy())
    return out
