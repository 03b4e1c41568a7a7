"""Huffman codes in plain Python: which bits stand for which symbol."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

MAX_CODE_LENGTH = 12  # so that a decoder's table of all of them fits the first-level cache


def code_lengths(counts: Sequence[int]) -> list[int]:
    """Bits of each symbol's code, 0 for those that do not occur; counts are halved until no code is too long.

    Source: Huffman, "A method for the construction of minimum-redundancy codes", 1952.

    >>> code_lengths([5, 1, 0, 2])
    [1, 2, 0, 2]
    """
    while max(lengths := _huffman(counts), default=0) > MAX_CODE_LENGTH:
        counts = [(count + 1) // 2 for count in counts]
    return lengths


def _huffman(counts: Sequence[int]) -> list[int]:
    """By two queues: leaves in order of (count, symbol), and joined nodes, each behind leaves of the same count."""
    leaves = deque(sorted((count, [symbol]) for symbol, count in enumerate(counts) if count))
    lengths = [0] * len(counts)
    if len(leaves) == 1:
        lengths[leaves[0][1][0]] = 1
    joined: deque = deque()
    while len(leaves) + len(joined) > 1:
        pair = [(leaves if leaves and (not joined or leaves[0][0] <= joined[0][0]) else joined).popleft() for _ in "ab"]
        symbols = pair[0][1] + pair[1][1]
        for symbol in symbols:
            lengths[symbol] += 1
        joined.append((pair[0][0] + pair[1][0], symbols))
    return lengths


def canonical_codes(lengths: Sequence[int]) -> dict[int, int]:
    """Symbol -> code, the first bit lowest. In order of (length, symbol), codes read from the first bit count upwards.

    >>> canonical_codes([1, 2, 0, 2])
    {0: 0, 1: 1, 3: 3}
    """
    codes, code, last = {}, 0, 0
    for length, symbol in sorted((n, s) for s, n in enumerate(lengths) if n):
        code <<= length - last
        codes[symbol] = int(f"{code:0{length}b}"[::-1], 2)
        code, last = code + 1, length
    return codes


def check_huffman(condition: bool, what: str) -> None:
    """Raise ValueError unless a payload is one that the encoder writes."""
    if not condition:
        raise ValueError(f"Huffman payload: {what}; it is corrupt")
