"""Signs in C++."""

from __future__ import annotations

from torch import Tensor

from .. import _native
from ..flags import Flag
from ..reduce import sum_payloads
from .views import views

__all__ = ["encode", "decode_add", "decode_sum"]


def encode(xs: list[Tensor], out: Tensor, residuals: list[Tensor] | None, fixed_scale: float | None) -> None:
    _native.sign_encode(views(xs), out.numpy(), views(residuals), fixed_scale)


def decode_add(payload: Tensor, outs: list[Tensor], weight: float) -> None:
    _native.sign_decode_add(payload.numpy(), views(outs), weight)


def decode_sum(payloads: list[Tensor], outs: list[Tensor], weight: float) -> Flag:
    return sum_payloads(decode_add, payloads, outs, weight)
