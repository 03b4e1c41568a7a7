"""Words of equal width, bit-packed; each segment begins at a byte of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import bits as bit
from .backend import kernel
from .checks import counted, payload_bytes


def nbytes(count: int, bits: int) -> int:
    """Bytes of a segment of `count` words of `bits` bits each."""
    return (count * bits + 7) // 8


def encode(words: Tensor, counts: Sequence[int], bits: int, out: Tensor) -> None:
    """Write the low `bits` bits of each word, one after the other, the lowest bit first.

    Args:
        words: int32, flat.
        counts: words of each segment.
        bits: 0 to 31.
        out: uint8 of the `nbytes` of all segments, written.

    Raises:
        ValueError: if `bits` is out of range, or a buffer has the wrong size.

    Example:
        >>> out = torch.empty(2, dtype=torch.uint8)
        >>> encode(torch.tensor([1, 2, 3], dtype=torch.int32), [3], 4, out)
        >>> out
        tensor([33,  3], dtype=torch.uint8)
    """
    device = words.device
    out = payload_bytes("out", out, _total_nbytes(counts, bits), device)
    _encode.on[device.type](counted("words", words, counts, torch.int32, device), list(counts), bits, out)


def decode(payload: Tensor, counts: Sequence[int], bits: int) -> Tensor:
    """The words that `encode` wrote, int32 and flat.

    Raises:
        ValueError: if `bits` is out of range or the payload has the wrong size.
    """
    payload = payload_bytes("payload", payload, _total_nbytes(counts, bits), payload.device)
    return _decode.on[payload.device.type](payload, list(counts), bits)


def _total_nbytes(counts: Sequence[int], bits: int) -> int:
    if not 0 <= bits <= 31:
        raise ValueError(f"bits: expected 0 to 31, got {bits}")
    return sum(nbytes(count, bits) for count in counts)


# ---- the reference ----


@kernel
def _encode(words: Tensor, counts: list[int], bits: int, out: Tensor) -> None:
    codes = [torch.empty(0, dtype=torch.uint8, device=out.device)]
    codes += [bit.pack(bit.to_bits(part.long(), bits)) for part in bit.split(words, counts)]
    out.copy_(torch.cat(codes))


@kernel
def _decode(payload: Tensor, counts: list[int], bits: int) -> Tensor:
    # Without bits there are no bytes, and `from_bits` cannot tell how many words they hold.
    if bits == 0:
        return torch.zeros(sum(counts), dtype=torch.int32, device=payload.device)
    words = [torch.empty(0, dtype=torch.int64, device=payload.device)]
    for code, count in zip(bit.split(payload, [nbytes(k, bits) for k in counts]), counts, strict=True):
        words.append(bit.from_bits(bit.unpack(code)[: count * bits], bits))
    return torch.cat(words).int()
