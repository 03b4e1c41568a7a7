"""The base of codecs that are built from one other codec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..base import Codec
from ..types import Key


@dataclass(frozen=True, repr=False)
class Wrapper(Codec):
    """A codec around another one."""

    codec: Codec

    def __post_init__(self) -> None:
        _ = self.traits  # refuses what it does not carry

    def combine(self, totals: list[Tensor]) -> None:
        self.codec.combine(totals)

    def reaching(self, segments: Sequence[Tensor], keys: Sequence[Key]) -> Sequence[Tensor]:
        return self.codec.reaching(segments, keys)
