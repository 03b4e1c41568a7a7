"""The contract of a codec whose workers agree on some numbers before they encode."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from .base import Codec


class AgreedCodec(Codec):
    """A codec whose workers first agree on some numbers, such as a common scale, so that payloads can be added.

    In each step every worker sends its proposal to all others. Each worker combines the proposals in rank order, by sum
    or by maximum. `agreed` turns the result into the codec of this step, whose payloads are added on the wire. Outside
    of an averager the codec encodes without any agreement.
    """

    @property
    @abstractmethod
    def agreement(self) -> str | None:
        """How proposals are combined: "sum" or "max"; None if this configuration needs no agreement."""

    @abstractmethod
    def propose(self, segments: list[Tensor]) -> Tensor:
        """This worker's proposal for flat contiguous float32 segments: a float32 vector, as long on all workers."""

    @abstractmethod
    def agreed(self, total: Tensor, num_workers: int) -> Codec:
        """The summable codec of this step, from the sum or the maximum of all proposals."""
