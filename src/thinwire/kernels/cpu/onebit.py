"""Signs and two means in C++."""

from __future__ import annotations

from torch import Tensor

from .. import _native
from .views import views

__all__ = ["encode", "decode_add"]


def encode(xs: list[Tensor], out: Tensor, bucket_size: int, residuals: list[Tensor] | None) -> None:
    _native.onebit_encode(views(xs), out.numpy(), bucket_size, views(residuals))


def decode_add(payload: Tensor, outs: list[Tensor], weight: float, bucket_size: int) -> None:
    _native.onebit_decode_add(payload.numpy(), views(outs), weight, bucket_size)
