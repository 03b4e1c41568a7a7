"""Huffman codes in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import debug
from .. import _native
from ..entropy import Symbols

__all__ = ["encode", "decode"]


def encode(packed: Tensor, symbols: Symbols) -> Tensor:
    out = debug.empty(packed.numel() + 9, dtype=torch.uint8, device="cpu")
    return out[: _native.huffman_encode(packed.numpy(), symbols.counts, symbols.bits, out.numpy())]


def decode(payload: Tensor, symbols: Symbols) -> Tensor:
    out = debug.empty(symbols.nbytes, dtype=torch.uint8, device="cpu")
    _native.huffman_decode(payload.numpy(), symbols.counts, symbols.bits, out.numpy())
    return out
