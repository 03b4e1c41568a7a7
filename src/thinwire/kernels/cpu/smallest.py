"""Ascending indices by the smallest of three codes in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import debug
from .. import _native

__all__ = ["encode", "decode"]


def encode(indices: Tensor, counts: list[int], numels: list[int]) -> Tensor:
    return torch.from_numpy(_native.smallest_encode(indices.numpy(), counts, numels))


def decode(payload: Tensor, counts: list[int], numels: list[int]) -> Tensor:
    indices = debug.empty(sum(counts), dtype=torch.int32, device="cpu")
    _native.smallest_decode(payload.numpy(), counts, numels, indices.numpy())
    return indices
