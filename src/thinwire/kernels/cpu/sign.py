"""Signs in C++."""

from __future__ import annotations

from torch import Tensor

from .. import _native
from .views import views

__all__ = ["encode", "decode_add"]


def encode(xs: list[Tensor], out: Tensor, residuals: list[Tensor] | None, fixed_scale: float | None) -> None:
    _native.sign_encode(views(xs), out.numpy(), views(residuals), fixed_scale)


def decode_add(payload: Tensor, outs: list[Tensor], weight: float) -> None:
    _native.sign_decode_add(payload.numpy(), views(outs), weight)
