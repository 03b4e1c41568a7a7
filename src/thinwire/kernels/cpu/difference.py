"""CHOCO's and DeepSqueeze's rounds in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _native
from ..quantize import Quantizer
from .quantize import native_quantizer
from .views import views

__all__ = ["encode", "sums", "choco_add", "choco_add_dense", "squeeze_add"]


def encode(
    xs: list[Tensor],
    ys: list[Tensor],
    add: bool,
    out: Tensor,
    keys: list[int],
    quantizer: Quantizer,
    measured: bool,
) -> Tensor | None:
    native = native_quantizer(quantizer)
    sums = _native.difference_encode(views(xs), views(ys), add, out.numpy(), keys, native, measured)
    return torch.tensor(sums, dtype=torch.float64, device="cpu") if measured else None


def sums(vs: list[Tensor], cs: list[Tensor]) -> Tensor:
    return torch.tensor(_native.dense_sums(views(vs), views(cs)), dtype=torch.float64, device="cpu")


def choco_add(
    xs: list[Tensor],
    copies: list[Tensor],
    gaps: list[Tensor],
    payloads: list[Tensor],
    factors: list[float],
    weights: list[float],
    step: float,
    quantizer: Quantizer,
) -> None:
    native = native_quantizer(quantizer)
    _native.choco_decode_add(views(xs), views(copies), views(gaps), views(payloads), factors, weights, step, native)


def choco_add_dense(
    xs: list[Tensor],
    copies: list[Tensor],
    gaps: list[Tensor],
    vectors: list[Tensor],
    weights: list[float],
    step: float,
) -> None:
    _native.choco_dense_add(views(xs), views(copies), views(gaps), views(vectors), weights, step)


def squeeze_add(
    xs: list[Tensor],
    lost: list[Tensor] | None,
    payloads: list[Tensor],
    factors: list[float],
    weights: list[float],
    step: float,
    quantizer: Quantizer,
) -> None:
    native = native_quantizer(quantizer)
    _native.squeeze_decode_add(views(xs), views(lost), views(payloads), factors, weights, step, native)
