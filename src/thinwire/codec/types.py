"""The small records of a codec: sizes, keys of random numbers, symbols and selections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..kernels.entropy import Symbols as Symbols  # exported from here too
from ..kernels.random import Key as Key
from ..schedule import Schedule

Size = int | torch.Size

# Of one tensor, or of each in a list of segments: what the public methods of a codec take; `as_list` makes lists of them.
Tensors = Tensor | Sequence[Tensor]
Sizes = Size | Sequence[Size]
Keys = Key | Sequence[Key]

Number = TypeVar("Number", int, float)


class Selection(NamedTuple):
    """The elements that a sparsifier keeps, segment after segment.

    Attributes:
        indices: int32, ascending within a segment and local to it.
        values: float32, the elements themselves; empty where only the positions matter.
        counts: how many elements of each segment are kept.
    """

    indices: Tensor
    values: Tensor
    counts: list[int]

    @classmethod
    def of_positions(cls, indices: Tensor, counts: list[int]) -> Selection:
        """Positions without values."""
        return cls(indices, indices.new_empty(0, dtype=torch.float32), counts)


def as_list(value: Any) -> list[Any]:
    """A list of tensors, keys or sizes: of the single one that was given, or of all in a sequence."""
    # A `torch.Size` is a tuple, but counts as one size.
    return [value] if isinstance(value, (Tensor, Key, Size)) else list(value)


def segment_numels(size: Sizes) -> list[int]:
    """Elements of each segment of one size, or of several."""
    return [s if isinstance(s, int) else s.numel() for s in as_list(size)]


def number(value: Number | Schedule) -> Number:
    """The value of a field that may also hold a schedule.

    Raises:
        ValueError: the field still holds a schedule, which has a value only at a given progress.
    """
    if isinstance(value, Schedule):
        text = "use the codec in an averager, or call thinwire.schedule.resolve(codec, progress)"
        raise ValueError(f"{value} has no value yet: {text}")
    return value
