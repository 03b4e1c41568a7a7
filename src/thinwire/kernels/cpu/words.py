"""Words of equal width, bit-packed in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import debug
from .. import _native

__all__ = ["encode", "decode"]


def encode(words: Tensor, bits: int, out: Tensor) -> None:
    _native.words_encode(words.numpy(), bits, out.numpy())


def decode(payload: Tensor, count: int, bits: int) -> Tensor:
    words = debug.empty(count, dtype=torch.int32, device="cpu")
    _native.words_decode(payload.numpy(), bits, words.numpy())
    return words
