"""Debug mode: the environment variable `THINWIRE_DEBUG=1` makes the library check its own use of memory.

Buffers that the library allocates without writing them start as NaN (floats) or as bytes 0xFF (integers), so that an
element that nobody writes shows in the result. Communicators compare the checksums of sent tensors at the call and at
`wait()`, so that a write in between raises an error. Debug mode reads every message twice; do not measure with it.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable

import torch
from torch import Tensor

enabled: bool = os.environ.get("THINWIRE_DEBUG", "") not in ("", "0")


def empty(*shape: int, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Tensor:
    """Allocate a tensor that the caller writes completely: `torch.empty`, filled with NaN or 0xFF in debug mode.

    Args:
        shape: sizes of the dimensions.
        dtype: None for PyTorch's default, float32.
        device: None for PyTorch's default device.

    Example:
        >>> empty(2, 3).shape
        torch.Size([2, 3])
    """
    tensor = torch.empty(shape, dtype=dtype, device=device)
    return filled(tensor) if enabled else tensor


def empty_like(tensor: Tensor, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Tensor:
    """Allocate a tensor of the same shape and strides: `torch.empty_like`, filled with NaN or 0xFF in debug mode.

    Args:
        tensor: gives the shape, and dtype and device where these are None.
        dtype: of the new tensor.
        device: of the new tensor.

    Example:
        >>> empty_like(torch.zeros(2, dtype=torch.int32)).dtype
        torch.int32
    """
    fresh = torch.empty_like(tensor, dtype=dtype, device=device)
    return filled(fresh) if enabled else fresh


def filled(tensor: Tensor) -> Tensor:
    """Fill a tensor with NaN, or with bytes 0xFF if its dtype is an integer type, and return it.

    Example:
        >>> filled(torch.zeros(2)), filled(torch.zeros(2, dtype=torch.uint8))
        (tensor([nan, nan]), tensor([255, 255], dtype=torch.uint8))
    """
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(float("nan"))
    return tensor.fill_(255 if tensor.dtype == torch.uint8 else -1)


def checksums(messages: Iterable[Tensor]) -> list[int]:
    """Compute the CRC-32 of each message, a flat tensor of uint8; on a GPU this waits for the stream.

    Example:
        >>> checksums([torch.zeros(4, dtype=torch.uint8)])
        [558161692]
    """
    return [zlib.crc32(message.cpu().numpy().data) for message in messages]
