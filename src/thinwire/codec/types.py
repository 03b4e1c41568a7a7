"""The small records of a codec: sizes, keys of random numbers, symbols and selections."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import kernels
from ..kernels.entropy import Symbols as Symbols  # exported from here too

Size = int | torch.Size


class Key(NamedTuple):
    """Names one independent sequence of random numbers: pure data, the same on every machine and backend.

    Args:
        seed: the seed of the run.
        stream: tells tensors and workers apart.
        step: tells training steps apart.
    """

    seed: int = 0
    stream: int = 0
    step: int = 0

    def mixed(self) -> int:
        """The 64-bit key of the counter-based generator."""
        return kernels.mix_key(*self)


class Selection(NamedTuple):
    """The elements that are kept, segment after segment.

    Attributes:
        indices: int32, ascending within a segment and local to it.
        values: float32, the elements themselves; empty where only the positions matter.
        counts: how many elements of each segment are kept.
    """

    indices: Tensor
    values: Tensor
    counts: list[int]
