"""Moniqua's kernels in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _native
from .views import views

__all__ = ["encode", "sums", "add", "recover_add"]


def encode(xs: list[Tensor], out: Tensor, key: int, bits: int, modulus: float) -> tuple[Tensor, Tensor]:
    check, largest = _native.modular_encode(views(xs), out.numpy(), key, bits, modulus)
    signed = check - (check >> 63 << 64)
    return torch.tensor(signed, dtype=torch.int64, device="cpu"), torch.tensor(
        largest, dtype=torch.float32, device="cpu"
    )


def sums(own: Tensor, theirs: Tensor, numel: int, key: int, bits: int) -> Tensor:
    sums = _native.modular_sums(own.numpy(), theirs.numpy(), numel, key, bits)
    return torch.tensor(sums, dtype=torch.int64, device="cpu")


def add(outs: list[Tensor], payloads: list[Tensor], weights: list[float], bits: int) -> None:
    _native.modular_add(views(outs), views(payloads), weights, bits)


def recover_add(
    outs: list[Tensor], own: Tensor, payloads: list[Tensor], weights: list[float], bits: int, modulus: float
) -> bool:
    return _native.modular_recover_add(views(outs), own.numpy(), views(payloads), weights, bits, modulus)
