"""Entropy coding of bit-packed symbols: a canonical Huffman code of their own frequencies.

Source: Huffman, "A method for the construction of minimum-redundancy codes", 1952.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import bits as bit
from .backend import kernel
from .checks import payload_bytes, vector

MAX_CODE_LENGTH = 12  # so that a decoder's table of all codes fits the first-level cache


class Symbols(NamedTuple):
    """How symbols are packed: `counts[i]` of `bits` bits for segment i, each segment byte aligned."""

    bits: int
    counts: list[int]

    @property
    def nbytes(self) -> int:
        """Size of all symbols in bytes."""
        return sum(self.segment_nbytes)

    @property
    def segment_nbytes(self) -> list[int]:
        """Size of each segment's symbols in bytes."""
        return [(n * self.bits + 7) // 8 for n in self.counts]


def encode(packed: Tensor, symbols: Symbols) -> Tensor:
    """Entropy coding of packed symbols: a canonical Huffman code of their own frequencies; its lengths are sent along.

    Args:
        packed: uint8, `symbols.nbytes` long, as `quantize.encode` writes its codes.
        symbols: bits (1 to 8) and counts.

    Returns:
        uint8, of `packed.numel() + 1` bytes at most: where the code gains nothing, symbols are sent as they are.

    Raises:
        ValueError: if `bits` is out of range or the size does not fit the counts.

    Example:
        >>> packed, symbols = torch.zeros(500, dtype=torch.uint8), Symbols(bits=4, counts=[1000])
        >>> payload = encode(packed, symbols)
        >>> payload.numel()  # a tag, 16 code lengths, and a bit for each symbol
        134
        >>> torch.equal(decode(payload, symbols), packed)
        True
    """
    _check_symbols(symbols)
    packed = payload_bytes("packed", packed, symbols.nbytes, packed.device)
    return _encode.on[packed.device.type](packed, symbols)


def decode(payload: Tensor, symbols: Symbols) -> Tensor:
    """The packed symbols that `encode` coded.

    Raises:
        ValueError: if the payload holds anything but so many symbols.
    """
    _check_symbols(symbols)
    payload = vector("payload", payload, torch.uint8, payload.device)
    return _decode.on[payload.device.type](payload, symbols)


def _check_symbols(symbols: Symbols) -> None:
    if not 1 <= symbols.bits <= 8:
        raise ValueError(f"bits: expected 1 to 8, got {symbols.bits}")


# ---- the code ----


def code_lengths(counts: Sequence[int]) -> list[int]:
    """Bits of each symbol's code, 0 for symbols that do not occur. Counts are halved until no code is too long.

    Example:
        >>> code_lengths([5, 1, 0, 2])
        [1, 2, 0, 2]
    """
    # The loop ends: at equal counts, 256 symbols have codes of 8 bits.
    while max(lengths := _huffman(counts), default=0) > MAX_CODE_LENGTH:
        counts = [(count + 1) // 2 for count in counts]  # rounded up, since 0 would say that a symbol does not occur
    return lengths


def _huffman(counts: Sequence[int]) -> list[int]:
    """By two queues: leaves in order of (count, symbol), and joined nodes, each behind leaves of the same count."""
    leaves = deque(sorted((count, [symbol]) for symbol, count in enumerate(counts) if count))
    lengths = [0] * len(counts)
    if len(leaves) == 1:
        lengths[leaves[0][1][0]] = 1  # a length of 0 would say that the symbol does not occur
    joined: deque[tuple[int, list[int]]] = deque()
    while len(leaves) + len(joined) > 1:
        pair = [(leaves if leaves and (not joined or leaves[0][0] <= joined[0][0]) else joined).popleft() for _ in "ab"]
        symbols = pair[0][1] + pair[1][1]
        for symbol in symbols:
            lengths[symbol] += 1
        joined.append((pair[0][0] + pair[1][0], symbols))
    return lengths


def canonical_codes(lengths: Sequence[int]) -> dict[int, int]:
    """Symbol -> code, the first bit lowest. In order of (length, symbol), codes read from the first bit count upwards.

    Example:
        >>> canonical_codes([1, 2, 0, 2])
        {0: 0, 1: 1, 3: 3}
    """
    codes: dict[int, int] = {}
    code = last = 0
    for length, symbol in sorted((n, s) for s, n in enumerate(lengths) if n):
        code <<= length - last
        codes[symbol] = int(f"{code:0{length}b}"[::-1], 2)
        code, last = code + 1, length
    return codes


# ---- the reference ----


@kernel
def _encode(packed: Tensor, symbols: Symbols) -> Tensor:
    bits, parts = symbols.bits, bit.split(packed, symbols.segment_nbytes)
    codes_of_parts = [
        bit.from_bits(bit.unpack(p)[: n * bits], bits) for p, n in zip(parts, symbols.counts, strict=True)
    ]
    values = torch.cat([packed[:0].long(), *codes_of_parts])
    lengths = code_lengths(torch.bincount(values, minlength=2**bits).tolist())
    codes = canonical_codes(lengths)
    length = torch.tensor(lengths, device=packed.device)[values]
    table = torch.tensor([a | b << 4 for a, b in zip(lengths[::2], lengths[1::2], strict=True)], device=packed.device)
    if 1 + table.numel() + (int(length.sum()) + 7) // 8 > packed.numel():
        return torch.cat([packed.new_zeros(1), packed])
    code = torch.tensor([codes.get(s, 0) for s in range(2**bits)], device=packed.device)[values]
    places = torch.arange(MAX_CODE_LENGTH, device=packed.device)
    stream = (code[:, None] >> places)[places < length[:, None]] & 1
    return torch.cat([packed.new_ones(1), table.to(torch.uint8), bit.pack(stream.to(torch.uint8))])


@kernel
def _decode(payload: Tensor, symbols: Symbols) -> Tensor:
    bits = symbols.bits
    _check(payload.numel() >= 1 and int(payload[0]) <= 1, "its first byte is neither 0 nor 1")
    if payload[0] == 0:
        _check(payload.numel() == symbols.nbytes + 1, "its size does not fit the counts")
        return payload[1:].clone()
    table, stream = payload[1 : 1 + 2**bits // 2], payload[1 + 2**bits // 2 :]
    _check(table.numel() == 2**bits // 2, "it ends before its code lengths")
    lengths = [length for byte in table.tolist() for length in (byte & 15, byte >> 4)]
    _check(max(lengths) <= MAX_CODE_LENGTH, "a code is too long")
    # Kraft's inequality. Sums of powers of two are exact, so it needs no tolerance.
    _check(sum(2.0**-n for n in lengths if n) <= 1, "its code lengths are no code")
    values = _read_symbols(bit.unpack(stream).tolist(), lengths, sum(symbols.counts))
    parts = bit.split(torch.tensor(values, dtype=torch.int64, device=payload.device), symbols.counts)
    return torch.cat([payload[:0], *(bit.pack(bit.to_bits(part, bits)) for part in parts)])


def _read_symbols(stream: list[int], lengths: list[int], count: int) -> list[int]:
    meaning = {(lengths[symbol], code): symbol for symbol, code in canonical_codes(lengths).items()}
    symbols: list[int] = []
    at = 0
    for _ in range(count):
        code = length = 0
        while (length, code) not in meaning:
            _check(at < len(stream) and length < MAX_CODE_LENGTH, "it holds bits that are no code, or too few")
            code |= stream[at] << length
            length, at = length + 1, at + 1
        symbols.append(meaning[length, code])
    _check(len(stream) - at < 8 and not any(stream[at:]), "its size does not fit the counts")
    return symbols


def _check(condition: bool, what: str) -> None:
    """Raise ValueError unless a payload is one that the encoder writes."""
    if not condition:
        raise ValueError(f"Huffman payload: {what}; it is corrupt")
