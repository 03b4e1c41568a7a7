"""Selected elements out of dense segments, and back into them, in C++."""

from __future__ import annotations

from torch import Tensor

from ... import debug
from .. import _native
from ..flags import Flag
from .views import views

__all__ = ["gather", "gather_marked", "write", "clear", "add", "total"]


def gather(xs: list[Tensor], indices: Tensor, counts: list[int]) -> Tensor:
    values = debug.empty(indices.numel(), device="cpu")
    _native.gather(views(xs), indices.numpy(), values.numpy(), counts)
    return values


def gather_marked(xs: list[Tensor], indices: Tensor, counts: list[int]) -> Tensor:
    values = debug.empty(indices.numel(), device="cpu")
    _native.gather_marked(views(xs), indices.numpy(), values.numpy(), counts)
    return values


def write(outs: list[Tensor], indices: Tensor, values: Tensor, counts: list[int]) -> None:
    _native.scatter_write(views(outs), indices.numpy(), values.numpy(), counts)


def clear(outs: list[Tensor], indices: Tensor, counts: list[int]) -> None:
    _native.scatter_clear(views(outs), indices.numpy(), counts)


def add(outs: list[Tensor], indices: Tensor, values: Tensor, counts: list[int], weight: float) -> None:
    _native.scatter_add(views(outs), indices.numpy(), values.numpy(), counts, weight)


def total(
    outs: list[Tensor], indices: list[Tensor], values: list[Tensor], counts: list[list[int]], weight: float
) -> Flag:
    return _native.scatter_total(views(outs), views(indices), views(values), counts, weight)
