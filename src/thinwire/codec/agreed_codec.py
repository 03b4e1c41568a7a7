"""The contract of a codec whose workers agree on some numbers before they encode."""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from .base import Codec
from .traits import Traits


class AgreedCodec(Codec):
    """A codec whose workers first agree on some numbers, such as a common scale, so that payloads can be added.

    In each step workers combine their proposals: sums by an all-reduce, maxima by an all-gather. `agreed` turns the result
    into the codec of this step, whose payloads are added on the wire. Outside of an averager the codec encodes without any
    agreement.
    """

    combined_by: ClassVar[str]
    """How proposals are combined: "sum" or "max"."""

    @cached_property
    def traits(self) -> Traits:
        return Traits(agreement=self)

    @abstractmethod
    def propose(self, segments: list[Tensor]) -> Tensor:
        """This worker's proposal for flat contiguous float32 segments: a float32 vector, as long on all workers."""

    @abstractmethod
    def agreed(self, total: Tensor, num_workers: int) -> Codec:
        """The summable codec of this step, from the sum or the maximum of all proposals."""
