"""Segments that one codec encodes in one call, of several such groups that share a payload."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from torch import Tensor

from ..base import Codec
from ..types import Size

ItemT = TypeVar("ItemT")


class CodecGroup(NamedTuple):
    """The segments of one codec, by their positions."""

    codec: Codec
    positions: Sequence[int]

    def of(self, items: Sequence[ItemT]) -> list[ItemT]:
        """What belongs to these segments, of what belongs to all; nothing of nothing."""
        return [items[i] for i in self.positions] if items else []

    def nbytes(self, sizes: Sequence[Size]) -> int:
        """Bytes of the payload of these segments, or an upper bound, for the sizes of all."""
        return self.codec.nbytes(self.of(sizes))


def split_groups(
    payloads: Sequence[Tensor], groups: Sequence[CodecGroup], sizes: Sequence[Size]
) -> list[tuple[CodecGroup, list[Tensor]]]:
    """Each group with its part of every payload, in which the groups stand one after the other.

    Args:
        payloads: of all segments.
        groups: if there are several, their codecs have a fixed size.
        sizes: of all segments.
    """
    # Without sizes, because a single codec may be of variable size.
    if len(groups) == 1:
        return [(groups[0], list(payloads))]
    parts = [payload.split([group.nbytes(sizes) for group in groups]) for payload in payloads]
    return [(group, [part[i] for part in parts]) for i, group in enumerate(groups)]
