"""Quantization to evenly spaced levels in C++."""

from __future__ import annotations

from torch import Tensor

from .. import _native
from ..quantize import Quantizer
from .views import views

__all__ = ["encode", "decode_add", "decode_sum"]


def native_quantizer(q: Quantizer) -> _native.Quantizer:
    return _native.Quantizer(_native.Buckets(q.bits, q.bucket_size, q.norm == "l2"), q.num_steps)


def encode(
    xs: list[Tensor], out: Tensor, keys: list[int], quantizer: Quantizer, residuals: list[Tensor] | None
) -> None:
    _native.quantize_encode(views(xs), out.numpy(), keys, native_quantizer(quantizer), views(residuals))


def decode_add(payload: Tensor, outs: list[Tensor], weight: float, quantizer: Quantizer) -> None:
    _native.quantize_decode_add(payload.numpy(), views(outs), weight, native_quantizer(quantizer))


def decode_sum(payloads: list[Tensor], outs: list[Tensor], weight: float, quantizer: Quantizer) -> bool:
    return _native.quantize_decode_sum(views(payloads), views(outs), weight, native_quantizer(quantizer))
