"""The base of codecs that are built from one other codec."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..base import Codec


@dataclass(frozen=True, repr=False)
class Wrapper(Codec):
    """A codec around another one, which loses nothing by itself: it is unbiased where that one is."""

    codec: Codec

    def parts(self) -> tuple[Codec, ...]:
        return (self.codec,)

    def map(self, fn: Callable[[Codec], Codec]) -> Codec:
        return replace(self, codec=fn(self.codec))

    @property
    def unbiased(self) -> bool:
        """The same as for the codec."""
        return self.codec.unbiased
