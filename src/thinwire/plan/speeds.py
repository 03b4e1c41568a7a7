"""How fast codecs are, as shares of the speed of a memory copy.

The table is from `docs/benchmarks.md` ("Codecs against a memory copy", one thread). Rows that
nobody has measured stand in `ASSUMED`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from ..average import Averager, Choco, Mean, PowerGossip, PowerSGD
from .record import Work


class Share(NamedTuple):
    """Speed of encode and of decode, as shares of a copy of the same floats. Higher => faster."""

    encode: float
    decode: float


MEASURED: Mapping[str, Share] = MappingProxyType(
    {
        "Cast()": Share(1.03, 1.07),
        "QSGD(bits=4)": Share(0.90, 1.20),
        "TopK(ratio=0.01)": Share(0.72, 2.68),
        "TopK(ratio=0.001)": Share(0.43, 6.80),  # with the momentum of Deep Gradient Compression
    }
)
ASSUMED: Mapping[str, Share] = MappingProxyType(
    {
        "chain(TopK(ratio=0.01), QSGD(bits=4))": Share(0.70, 2.60),  # hardly slower than TopK(0.01) alone
        "SignNorm()": Share(0.76, 1.12),  # as QSGD of one bit
        "matrix products": Share(0.33, 1.00),  # the matrix is read once for each product, and bounds the time
    }
)
_UNKNOWN = Share(0.5, 1.0)
_MEMORY = 0.67  # of a copy: reads gradient and memory, writes their sum


@dataclass(frozen=True)
class Speeds:
    """Speed of a copy, and the codecs' shares of it.

    Args:
        copy_bytes_per_second: of float32 in main memory; 12 GB/s lies in the range of `docs/benchmarks.md`.
        shares: by the codec's `repr`.

    Example:
        >>> import thinwire as tw
        >>> round(1e9 * Speeds(copy_bytes_per_second=9e9).seconds(tw.Mean(tw.QSGD(bits=4)), Work("encode", 900)))
        444
    """

    copy_bytes_per_second: float = 12e9
    shares: Mapping[str, Share] = field(default_factory=lambda: {**MEASURED, **ASSUMED}, hash=False)

    def seconds(self, averager: Averager, work: Work) -> float:
        """How long the averager encodes or decodes so many elements."""
        share = self.shares.get(_name(averager), _UNKNOWN)
        copy_seconds = 4 * work.numel / self.copy_bytes_per_second
        if work.part == "decode":
            return copy_seconds / share.decode
        adds_memory = isinstance(averager, Mean) and averager.memory is not None and not averager.has_momentum
        return copy_seconds / share.encode + (copy_seconds / _MEMORY if adds_memory else 0.0)


def _name(averager: Averager) -> str:
    if isinstance(averager, PowerSGD | PowerGossip):
        return "matrix products"
    return repr(averager.codec) if isinstance(averager, Mean | Choco) else ""
