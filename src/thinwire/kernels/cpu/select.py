"""Selection of the largest magnitudes in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _native
from .views import empty_selection, views

__all__ = ["topk", "above", "topk_in_chunks", "largest"]


def topk(xs: list[Tensor], counts: list[int]) -> tuple[Tensor, Tensor]:
    indices, values = empty_selection(sum(counts))
    _native.topk(views(xs), counts, indices.numpy(), values.numpy())
    return indices, values


def above(xs: list[Tensor], thresholds: list[float]) -> tuple[Tensor, Tensor, list[int]]:
    indices, values, counts = _native.above(views(xs), thresholds)
    return torch.from_numpy(indices), torch.from_numpy(values), counts


def topk_in_chunks(
    xs: list[Tensor], chunk: int, count: int, last_counts: list[int], total: int
) -> tuple[Tensor, Tensor]:
    indices, values = empty_selection(total)
    _native.topk_in_chunks(views(xs), chunk, count, last_counts, indices.numpy(), values.numpy())
    return indices, values


def largest(xs: list[Tensor]) -> list[float]:
    return _native.largest(views(xs))
