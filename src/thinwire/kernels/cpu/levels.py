"""Quantization to any levels in C++."""

from __future__ import annotations

from torch import Tensor

from .. import _native
from ..levels import Levels
from .views import views

__all__ = ["encode", "decode_add"]


def _native_levels(levels: Levels) -> _native.Levels:
    return _native.Levels(_native.Buckets(levels.bits, levels.bucket_size, levels.norm == "l2"), levels.values)


def encode(xs: list[Tensor], out: Tensor, keys: list[int], levels: Levels, residuals: list[Tensor] | None) -> None:
    _native.levels_encode(views(xs), out.numpy(), keys, _native_levels(levels), views(residuals))


def decode_add(payload: Tensor, outs: list[Tensor], weight: float, levels: Levels) -> None:
    _native.levels_decode_add(payload.numpy(), views(outs), weight, _native_levels(levels))
