"""Products with a few vectors, and updates of low rank, in C++."""

from __future__ import annotations

from torch import Tensor

from .. import _native
from .views import views

__all__ = ["products", "add", "add_products", "store"]


def _flat(factors: list[Tensor]) -> list[Tensor]:
    return [factor.view(-1) for factor in factors]


def products(xs: list[Tensor], rows: list[int], ps: list[Tensor], left: bool, outs: list[Tensor]) -> None:
    _native.low_rank_products(views(xs), rows, views(_flat(ps)), left, views(_flat(outs)))


def add(xs: list[Tensor], rows: list[int], a: list[Tensor], b: list[Tensor]) -> None:
    _native.low_rank_add(views(xs), rows, views(_flat(a)), views(_flat(b)))


def add_products(
    gs: list[Tensor],
    es: list[Tensor],
    outs: list[Tensor],
    factor: float,
    rows: list[int],
    ps: list[Tensor],
    made: list[Tensor],
) -> None:
    flat = views(_flat(ps)), views(outs), views(_flat(made))
    _native.low_rank_add_products(views(gs), views(es), factor, rows, *flat)


def store(xs: list[Tensor], rows: list[int], a: list[Tensor], b: list[Tensor]) -> bool:
    return _native.low_rank_store(views(xs), rows, views(_flat(a)), views(_flat(b)))
