"""Ternary values in C++."""

from __future__ import annotations

from torch import Tensor

from ... import debug
from .. import _native
from ..ternary import Ternary
from .views import views

__all__ = ["scales", "encode", "decode_add"]


def _native_ternary(ternary: Ternary) -> _native.Ternary:
    return _native.Ternary(ternary.base, ternary.size)


def scales(xs: list[Tensor], clip: float, bucket_size: int, num_scales: int) -> Tensor:
    scales = debug.empty(num_scales, device="cpu")
    _native.ternary_scales(views(xs), clip, bucket_size, scales.numpy())
    return scales


def encode(
    xs: list[Tensor],
    scales: Tensor,
    out: Tensor,
    keys: list[int],
    ternary: Ternary,
    residuals: list[Tensor] | None,
) -> None:
    _native.ternary_encode(views(xs), scales.numpy(), out.numpy(), keys, _native_ternary(ternary), views(residuals))


def decode_add(payload: Tensor, scales: Tensor, outs: list[Tensor], weight: float, ternary: Ternary) -> None:
    _native.ternary_decode_add(payload.numpy(), scales.numpy(), views(outs), weight, _native_ternary(ternary))
