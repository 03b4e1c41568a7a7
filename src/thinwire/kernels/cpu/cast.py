"""Shorter float types in C++."""

from __future__ import annotations

from torch import Tensor

from .. import _native
from ..cast import WIDTHS
from .views import views

__all__ = ["encode", "decode_add"]


def _float_type(dtype: str) -> int:
    return list(WIDTHS).index(dtype)


def encode(xs: list[Tensor], out: Tensor, dtype: str, residuals: list[Tensor] | None) -> None:
    _native.cast_encode(views(xs), out.numpy(), _float_type(dtype), views(residuals))


def decode_add(payload: Tensor, outs: list[Tensor], weight: float, dtype: str) -> None:
    _native.cast_decode_add(payload.numpy(), views(outs), weight, _float_type(dtype))
