"""Launches of Triton kernels: one launch serves all segments of a bucket.

Tables. A launch gets its segments as a table of int64 on the device: one row per property (first tile, pointer, size),
one column per segment. A program finds its segment by binary search in the row of first tiles, which is the first. What is
uploaded is kept for later steps with the same addresses and sizes, so that a steady state uploads random keys only.
Uploads come from pinned memory and nothing waits for them.

Alignment. A table's numbers are unknown to the compiler, which then loads element by element. So the segments that begin at
multiples of 16 bytes, and whose sizes are multiples of 128, are served by a launch of their own (`by_alignment`), whose
kernel is told so by the constant `VECTOR`. Most buckets have no others. What the compiler is told must hold: a GPU stops at
a wide load from a narrow address, which Triton's interpreter takes.

Numerics. Every kernel is launched with `enable_fp_fusion=False`: the reference rounds after each operation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...streams import current_stream, uploaded

T = TypeVar("T")

OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
_LAUNCHING = threading.Lock()
"""A first launch parses its kernel, and syntax trees cannot be made in two threads at once in Python 3.11 (SystemError)."""


def launch(function: Any, num_programs: int, device: torch.device, *arguments: Any, **constants: Any) -> None:
    """Start `num_programs` programs of a kernel on the device's current stream.

    Args:
        function: the `triton.jit` function.
        num_programs: size of the grid; 0 starts nothing.
        device: of all tensors.
        arguments: run-time arguments, in order.
        constants: arguments of type `tl.constexpr`.

    Raises:
        ValueError: if the tensors are in main memory.
    """
    _require_gpu(device)
    if num_programs:
        with _LAUNCHING, torch.cuda.device(device):
            function[(num_programs,)](*arguments, **constants, **OPTIONS)


def _require_gpu(device: torch.device) -> None:
    if device.type == "cpu":
        raise ValueError("tensors: Triton's kernels need tensors on a GPU, got tensors on the CPU")


def kept(make: Callable[..., T]) -> Callable[..., T]:
    """Decorate a function of a device and hashable arguments that uploads tables: the same arguments give the same result.

    A result is used on the stream that it was uploaded on, so that no kernel reads it too early.
    """

    @wraps(make)
    def get(device: torch.device, *arguments: Any) -> T:
        _require_gpu(device)
        stream = current_stream(device)
        # Not the device: "cuda" alone is one GPU now, and another one later.
        key = (make, stream.device_index, stream.cuda_stream, *arguments)
        # Without the lock: two threads may make the same table, and either one serves.
        result: T | None = _KEPT.get(key)
        if result is None:
            result = make(device, *arguments)
            _keep(key, result, LEAST_NUMBERS + sum(len(part) for part in arguments if isinstance(part, tuple)))
        return result

    return get


LEAST_NUMBERS = 64  # that a table counts as, beside those in its arguments: it takes 512 bytes on a GPU, however small
MAX_KEPT_NUMBERS = 1 << 21  # of all tables: a bucket of 300 tensors takes a few thousand
_KEPT: dict[tuple[Any, ...], Any] = {}
_LOCK = threading.Lock()
_kept_numbers = 0


def _keep(key: tuple[Any, ...], result: object, numbers: int) -> None:
    """Forget everything when there is too much: steps with the same addresses soon have their tables again."""
    global _kept_numbers
    with _LOCK:
        if _kept_numbers + numbers > MAX_KEPT_NUMBERS:
            _KEPT.clear()
            _kept_numbers = 0
        _KEPT[key] = result
        _kept_numbers += numbers


@kept
def _table(device: torch.device, *rows: tuple[int, ...]) -> Tensor:
    return uploaded(device, rows)


def table(device: torch.device, *rows: Sequence[int]) -> Tensor:
    """An int64 tensor of shape (rows, segments) on the device; the same numbers give the same tensor again."""
    return _table(device, *map(tuple, rows))


@kept
def floats(device: torch.device, values: tuple[float, ...]) -> Tensor:
    """Float32 numbers on the device; the same numbers give the same tensor again."""
    return uploaded(device, values, torch.float32)


WHOLE_WORDS = 128  # elements: the sizes of aligned segments are multiples, so that their codes fill whole 32-bit words


@dataclass(frozen=True)
class Launch:
    """One of the launches that serve a bucket; most buckets take one.

    Args:
        rows: the table.
        num_tiles: the number of programs.
        vector: the constant `VECTOR` of kernels.
    """

    rows: Tensor
    num_tiles: int
    vector: int = 1

    @classmethod
    def of(cls, device: torch.device, tiles: Sequence[int], rows: Sequence[Sequence[int]], vector: int = 1) -> Launch:
        """The launch for so many tiles of each segment; `rows` follow that of first tiles in its table."""
        first_tile = starts(tiles)
        return cls(uploaded(device, [first_tile[:-1], *rows]), first_tile[-1], vector)


def plan_launches(
    device: torch.device,
    rows: Sequence[Sequence[int]],
    num_tiles: Sequence[int],
    numels: Sequence[int],
    *addresses: Sequence[int],
    codes: Sequence[int] | None = None,
) -> list[Launch]:
    """A launch for the aligned segments, and one or two for the others; call it where its result is kept.

    Args:
        device: of the tables.
        rows: of the tables, after the row of first tiles.
        num_tiles: tiles of each segment.
        numels: elements of each.
        addresses: of each, in one or more buffers; 0 for none.
        codes: where the codes of each begin in a payload, in bytes; None where there are none.
    """
    found = by_alignment(num_tiles, numels, *addresses, codes=codes)
    return [Launch.of(device, tiles, rows, vector) for vector, tiles in found]


def by_alignment(
    num_tiles: Sequence[int], numels: Sequence[int], *addresses: Sequence[int], codes: Sequence[int] | None = None
) -> list[tuple[int, list[int]]]:
    """For each launch the constant `VECTOR`, and the tiles of each segment: 0 for those of the other launches.

    `VECTOR` is what all sizes are multiples of, where all addresses are multiples of 16; else 1. It is `WHOLE_WORDS` only
    where codes begin at multiples of 4 too: those of a segment of any size move the codes of all that follow.

    Example:
        >>> by_alignment([2, 1, 1], [4096, 7, 128], [64, 128, 256])
        [(128, [2, 0, 1]), (1, [0, 1, 0])]
        >>> by_alignment([2, 1, 1], [4096, 7, 128], [64, 128, 256], codes=[0, 2048, 2052])
        [(128, [2, 0, 1]), (1, [0, 1, 0])]
        >>> by_alignment([2, 1, 1], [4096, 8, 128], [64, 128, 256], codes=[0, 2048, 2051])
        [(128, [2, 0, 0]), (4, [0, 1, 1])]
    """
    vectors = []
    for numel, code, *places in zip(numels, codes or [0] * len(numels), *addresses, strict=True):
        is_placed = not any(place % 16 for place in places)
        is_whole = numel % WHOLE_WORDS == 0 and code % 4 == 0
        vectors.append(1 if not is_placed or numel % 4 else WHOLE_WORDS if is_whole else 4)
    if codes is None and 1 in vectors:  # few elements are in the smaller segments
        vectors = [1 if vector == 4 else vector for vector in vectors]
    found = [
        (vector, [n if each == vector else 0 for n, each in zip(num_tiles, vectors, strict=True)])
        for vector in (WHOLE_WORDS, 4, 1)
    ]
    # One launch at least: later kernels use its table, even where this one has no tiles.
    return [(vector, tiles) for vector, tiles in found if any(tiles)] or found[:1]


def launch_each(function: Any, launches: list[Launch], device: torch.device, *arguments: Any, **constants: Any) -> None:
    """Start a kernel of the arguments `(rows, *arguments)`, once for each launch."""
    for one in launches:
        launch(function, one.num_tiles, device, one.rows, *arguments, VECTOR=one.vector, **constants)


def pointers(tensors: Sequence[Tensor] | None, count: int = 0) -> tuple[int, ...]:
    """The address of each tensor; `count` zeros for None."""
    return (0,) * count if tensors is None else tuple([t.data_ptr() for t in tensors])


def starts(sizes: Sequence[int], offset: int = 0) -> list[int]:
    """Where each of consecutive parts begins, and at last where they end.

    Example:
        >>> starts([3, 4], offset=1)
        [1, 4, 8]
    """
    return list(accumulate(sizes, initial=offset))


def tiles_of(numels: Sequence[int], size: int) -> list[int]:
    """Tiles of `size` elements that hold each segment."""
    return [-(-n // size) for n in numels]


def are_aligned(*tensors: Tensor) -> bool:
    """Whether float32 numbers may be read at the tensors' addresses."""
    return all(t.data_ptr() % 4 == 0 for t in tensors)
