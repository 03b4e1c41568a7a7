"""Debug mode: the environment variable `THINWIRE_DEBUG=1` makes the library check its own use of memory.

Buffers that the library allocates without writing them start as NaN (floats) or as bytes 0xFF (integers), so that an
element that nobody writes shows in the result. Communicators compare the checksums of sent tensors at the call and at
`wait()`, so that a write in between raises an error. Codecs compare the size of each payload with the announced one.
`Gradients` warns if the workers' models are not equal in a backward pass. Debug mode reads every message twice, and hashes the
model in each step; do not measure with it.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

enabled: bool = os.environ.get("THINWIRE_DEBUG", "") not in ("", "0")


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


def filling(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`torch.empty` or `torch.empty_like`, with its result `filled`.

    Example:
        >>> filling(torch.empty)(2)
        tensor([nan, nan])
    """
    return lambda *shape, **options: filled(allocate(*shape, **options))


# These allocate a tensor that the caller writes completely.
empty: Callable[..., Tensor] = filling(torch.empty) if enabled else torch.empty
empty_like: Callable[..., Tensor] = filling(torch.empty_like) if enabled else torch.empty_like
