"""Bits and codes in plain PyTorch, for the references: the lowest bit first."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def split(x: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    """`x.split(sizes)`, but also for an empty list, which PyTorch refuses."""
    return x.split(sizes) if sizes else ()


def pad(x: Tensor, multiple: int) -> Tensor:
    """Append zeros to the last dimension until it is a multiple."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % multiple))


def pack(bits: Tensor) -> Tensor:
    """Bits (0 or 1, uint8) to bytes, the first bit lowest."""
    weights = 1 << torch.arange(8, device=bits.device)
    return (pad(bits, 8).view(-1, 8) * weights).sum(-1).to(torch.uint8)


def unpack(payload: Tensor) -> Tensor:
    """Bytes to bits (0 or 1, uint8), the lowest bit first."""
    # Shifts of uint8: with int64 ones, each bit would take eight bytes.
    return ((payload[:, None] >> torch.arange(8, device=payload.device, dtype=torch.uint8)) & 1).flatten()


def to_bits(codes: Tensor, width: int) -> Tensor:
    """The low `width` bits of each code, one code after the other."""
    return ((codes[:, None] >> torch.arange(width, device=codes.device)) & 1).to(torch.uint8).flatten()


def from_bits(bits: Tensor, width: int) -> Tensor:
    """Undo `to_bits`: int64 codes of `width` > 0 bits."""
    return (bits.view(-1, width).long() << torch.arange(width, device=bits.device)).sum(-1)
