"""How fast codecs are, as shares of the speed of a memory copy.

Measured by `thinwire bench codecs` on one thread, 2026-11-20, and those of local updates and DeMo by `--measure`, 2026-11-29;
`docs/benchmarks.md` has a later run. The last rows are assumed.
`thinwire plan --measure` measures on the machine at hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from .sized import MEMORY, Work


class CopyShare(NamedTuple):
    """Speed of encode and of decode, as shares of a copy of the same floats. Higher => faster."""

    encode: float
    decode: float


SHARES: Mapping[str, CopyShare] = MappingProxyType(
    {
        "Cast()": CopyShare(1.03, 1.07),
        "QSGD(bits=4)": CopyShare(0.90, 1.20),
        "TopK(ratio=0.01)": CopyShare(0.72, 2.68),
        "BinMeans()": CopyShare(0.10, 0.65),
        "Float4()": CopyShare(0.45, 1.20),
        "chain(Tiles(divisors=True), BlockwiseTopK(ratio=0.02), BinMeans())": CopyShare(0.08, 0.12),
        "chain(DCT(divisors=True), BlockwiseTopK(ratio=0.0078125))": CopyShare(0.014, 0.03),
        "TopK(ratio=0.001)": CopyShare(0.43, 6.80),  # with the momentum of Deep Gradient Compression
        MEMORY: CopyShare(0.67, 1.00),  # reads gradient and memory, writes their sum
        # Assumed, not measured:
        "chain(TopK(ratio=0.01), QSGD(bits=4))": CopyShare(0.70, 2.60),  # hardly slower than TopK(0.01) alone
        "SignNorm()": CopyShare(0.76, 1.12),  # as QSGD of one bit
    }
)
_UNKNOWN = CopyShare(0.5, 1.0)


class _Copies(NamedTuple):
    """How long averagers of low rank work, in copies of the matrices: so many, and so many more for each column."""

    step: tuple[float, float]
    wait: tuple[float, float]

    def share(self, rank: int) -> CopyShare:
        """As shares of a copy's speed."""
        return CopyShare(*(1.0 / (fixed + rank * column) for fixed, column in self))


# Measured by `benchmarks/low_rank.py`, on one thread, 2026-11-29.
_LOW_RANK = {
    "PowerSGD": _Copies((2.3, 0.06), (3.3, 0.18)),
    "Dion": _Copies((1.3, 0.0), (4.5, 0.24)),
    "PowerGossip": _Copies((1.3, 0.17), (1.7, 0.1)),
}


@dataclass(frozen=True)
class Speeds:
    """Speed of a copy, and the codecs' shares of it.

    Args:
        copy_bytes_per_second: of float32 in main memory; 12 GB/s lies in the range of `docs/benchmarks.md`.
        shares: by the codec's `repr`.

    Example:
        >>> work = Work("encode", 900, "QSGD(bits=4)")
        >>> round(1e9 * Speeds(copy_bytes_per_second=9e9).seconds(work))
        444
    """

    copy_bytes_per_second: float = 12e9
    shares: Mapping[str, CopyShare] = field(default_factory=lambda: SHARES, hash=False)

    def seconds(self, work: Work) -> float:
        """How long a piece of work takes."""
        share = self.shares.get(work.name)
        if share is None:
            kind = work.name.partition("(")[0]
            share = _LOW_RANK.get(kind, _LOW_RANK["PowerSGD"]).share(work.rank) if work.rank else _UNKNOWN
        return 4 * work.numel / self.copy_bytes_per_second / (share.encode if work.part == "encode" else share.decode)
