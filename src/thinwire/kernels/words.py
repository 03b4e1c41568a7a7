"""Words of equal width, bit-packed."""

from __future__ import annotations

import torch
from torch import Tensor

from . import bits as bit
from .backend import kernel
from .checks import payload_bytes, vector


def nbytes(count: int, bits: int) -> int:
    """Bytes of `count` words of `bits` bits each."""
    return (count * bits + 7) // 8


def encode(words: Tensor, bits: int, out: Tensor) -> None:
    """Write the low `bits` bits of each word, one after the other, the lowest bit first.

    Args:
        words: int32.
        bits: 0 to 31.
        out: uint8 of `nbytes(words.numel(), bits)` bytes, written.

    Raises:
        ValueError: if `bits` is out of range or `out` has the wrong size.

    Example:
        >>> out = torch.empty(2, dtype=torch.uint8)
        >>> encode(torch.tensor([1, 2, 3], dtype=torch.int32), 4, out)
        >>> out
        tensor([33,  3], dtype=torch.uint8)
    """
    device = words.device
    out = payload_bytes("out", out, nbytes(words.numel(), _checked_bits(bits)), device)
    _encode.on[device.type](vector("words", words, torch.int32, device), bits, out)


def decode(payload: Tensor, count: int, bits: int) -> Tensor:
    """The `count` words that `encode` wrote, as int32.

    Raises:
        ValueError: if `bits` is out of range or the payload has the wrong size.
    """
    payload = payload_bytes("payload", payload, nbytes(count, _checked_bits(bits)), payload.device)
    return _decode.on[payload.device.type](payload, count, bits)


def _checked_bits(bits: int) -> int:
    if not 0 <= bits <= 31:
        raise ValueError(f"bits: expected 0 to 31, got {bits}")
    return bits


# ---- the reference ----


@kernel
def _encode(words: Tensor, bits: int, out: Tensor) -> None:
    out.copy_(bit.pack(bit.to_bits(words.long(), bits)))


@kernel
def _decode(payload: Tensor, count: int, bits: int) -> Tensor:
    if bits == 0:
        return torch.zeros(count, dtype=torch.int32, device=payload.device)
    return bit.from_bits(bit.unpack(payload)[: count * bits], bits).int()
