"""Reductions over segments in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _native
from .views import views

__all__ = ["all_finite", "chunk_norms", "mark_nonfinite"]


def all_finite(tensors: list[Tensor]) -> bool:
    return _native.all_finite(views(tensors))


def chunk_norms(xs: list[Tensor], chunk: int, out: Tensor) -> None:
    _native.chunk_norms(views(xs), chunk, out.numpy())


def mark_nonfinite(xs: list[Tensor], values: Tensor, counts: list[int]) -> None:
    if _native.all_finite(views(xs)):
        return
    for x, kept in zip(xs, values.split(counts), strict=True):
        if not _native.all_finite(views([x])):
            kept[:1] = torch.nan
