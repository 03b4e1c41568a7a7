"""Launches of Triton kernels: one launch serves all segments of a bucket.

Tables. A launch gets its segments as a table of int64 on the device: one row per property (pointer, size, first tile),
one column per segment. A program finds its segment by binary search in the row of first tiles. Tables that repeat from
step to step are kept, so that a steady state uploads random keys only. Uploads come from pinned memory and nothing
waits for them.

Numerics. Every kernel is launched with `enable_fp_fusion=False`: the reference rounds after each operation.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ...streams import refuse_capture

INTERPRETED = os.environ.get("TRITON_INTERPRET", "") == "1"  # read by Triton when it is imported
OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}


def launch(function: Any, num_programs: int, device: torch.device, *arguments: Any, **constants: Any) -> None:
    """Start `num_programs` programs of a kernel on the device's current stream.

    Args:
        function: the `triton.jit` function.
        num_programs: size of the grid; 0 starts nothing.
        device: of all tensors.
        arguments: run-time arguments, in order.
        constants: arguments of type `tl.constexpr`.

    Raises:
        ValueError: if the tensors are in main memory and Triton does not interpret.
    """
    if device.type == "cpu" and not INTERPRETED:
        raise ValueError(
            "tensors: expected them on a GPU, got tensors on the CPU; Triton's interpreter takes these if the environment "
            "variable TRITON_INTERPRET=1 is set before the first import"
        )
    if num_programs:
        with torch.cuda.device(device if device.type == "cuda" else -1):  # -1 changes nothing
            function[(num_programs,)](*arguments, **constants, **OPTIONS)


def table(device: torch.device, *rows: Sequence[int]) -> Tensor:
    """An int64 tensor of shape (rows, segments) on the device; the same numbers give the same tensor again."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _kept_table(tuple(map(tuple, rows)), device, stream)


def floats(device: torch.device, values: Sequence[float]) -> Tensor:
    """Float32 numbers on the device; the same numbers give the same tensor again."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _kept_floats(tuple(values), device, stream)


@lru_cache(maxsize=256)
def _kept_floats(values: tuple[float, ...], device: torch.device, stream: int) -> Tensor:
    del stream
    return _uploaded(values, device, torch.float32)


@lru_cache(maxsize=1024)
def _kept_table(rows: tuple[tuple[int, ...], ...], device: torch.device, stream: int) -> Tensor:
    # A table is used on the stream that it was uploaded on, so that no kernel reads it too early.
    del stream
    return _uploaded(rows, device)


def _uploaded(numbers: Sequence[object], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    refuse_capture(device)
    if device.type == "cpu":
        return torch.tensor(numbers, dtype=dtype, device="cpu")
    return torch.tensor(numbers, dtype=dtype, pin_memory=True, device="cpu").to(device, non_blocking=True)


def pointers(tensors: Sequence[Tensor] | None, count: int = 0) -> list[int]:
    """The address of each tensor; `count` zeros for None."""
    return [0] * count if tensors is None else [t.data_ptr() for t in tensors]


def starts(sizes: Sequence[int], offset: int = 0) -> list[int]:
    """Where each of consecutive parts begins, and at last where they end.

    Example:
        >>> starts([3, 4], offset=1)
        [1, 4, 8]
    """
    return list(accumulate(sizes, initial=offset))


def are_aligned(*tensors: Tensor) -> bool:
    """Whether float32 numbers may be read at the tensors' addresses."""
    return all(t.data_ptr() % 4 == 0 for t in tensors)
