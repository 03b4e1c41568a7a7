"""The list of all kernels with typical constants: what the compile tests and the table in docs/gpu.md walk over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Variant:
    """One kernel with one choice of constants.

    Args:
        name: `family.kernel: constants`, unique.
        function: the `triton.jit` function.
        constants: its arguments of type `tl.constexpr`.
        signature: Triton's types of its run-time arguments, by name.
        numel: elements of the segments that one program serves.
        least_bytes: per element, the least to read and write: each input once, each output once.
        cached_bytes: per element, what the program reads a second time, then from the cache.
        launches: of the whole operation.
        loop_trips: how often the program runs its loop over elements, if it has one.
    """

    name: str
    function: Any
    constants: Mapping[str, Any]
    signature: Mapping[str, str]
    numel: int
    least_bytes: float
    cached_bytes: float = 0.0
    launches: int = 1
    loop_trips: int = 1


VARIANTS: list[Variant] = []


def add_variant(variant: Variant) -> None:
    """Append to `VARIANTS`."""
    assert all(other.name != variant.name for other in VARIANTS), variant.name
    VARIANTS.append(variant)
