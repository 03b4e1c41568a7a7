"""Tensors in main memory as NumPy views, which the C++ extension takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ... import debug

Floats = NDArray[np.float32]


def views(tensors: Sequence[Tensor] | None) -> list[NDArray[Any]]:
    """A view of each tensor; none for None."""
    return [] if tensors is None else [t.numpy() for t in tensors]


def empty_selection(count: int) -> tuple[Tensor, Tensor]:
    """Buffers for the indices and the values of `count` selected elements."""
    return debug.empty(count, dtype=torch.int32, device="cpu"), debug.empty(count, device="cpu")
