"""Ascending indices by Elias-Fano or a bitmap in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import debug
from .. import _native

__all__ = ["encode", "decode"]


def encode(indices: Tensor, counts: list[int], numels: list[int], out: Tensor) -> None:
    _native.indices_encode(indices.numpy(), counts, numels, out.numpy())


def decode(payload: Tensor, counts: list[int], numels: list[int]) -> Tensor:
    indices = debug.empty(sum(counts), dtype=torch.int32, device="cpu")
    _native.indices_decode(payload.numpy(), counts, numels, indices.numpy())
    return indices
