"""Reductions over segments in C++."""

from __future__ import annotations

from torch import Tensor

from .. import _native
from .views import views

__all__ = ["all_finite", "chunk_norms"]


def all_finite(tensors: list[Tensor]) -> bool:
    return _native.all_finite(views(tensors))


def chunk_norms(xs: list[Tensor], chunk: int, out: Tensor) -> None:
    _native.chunk_norms(views(xs), chunk, out.numpy())
