"""Tensors as memory: their bytes, and new ones to receive into."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import debug


def flat_like(tensor: Tensor, numel: int) -> Tensor:
    """A new flat tensor of the same dtype and device, to receive into."""
    return debug.empty(numel, dtype=tensor.dtype, device=tensor.device)


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, as (num_bytes,) uint8."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() == 1:  # the stride of a single element may be anything, and `view` asks for 1
        flat = flat.as_strided((1,), (1,))
    return flat.view(torch.uint8)
