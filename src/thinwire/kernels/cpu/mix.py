"""Weighted differences, added in place, in C++."""

from __future__ import annotations

from torch import Tensor

from .. import _native
from .views import views

__all__ = ["add"]


def add(outs: list[Tensor], own: Tensor, theirs: list[Tensor], weights: list[float], own_weight: float) -> bool:
    return _native.mix_add(views(outs), own.numpy(), views(theirs), weights, own_weight)
