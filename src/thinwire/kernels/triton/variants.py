"""The list of all kernels with typical constants: what the compile tests and the table in docs/gpu.md walk over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Triton's types of run-time arguments. An argument of this name has this type in all kernels, but for `Variant.types`.
TYPES = {
    "argument": "fp32",
    "before": "*i32",
    "bits": "i32",
    "chosen": "*i32",
    "chunk": "i32",
    "clip": "fp32",
    "count": "i64",
    "counts": "*i32",
    "factor": "fp32",
    "faults": "*i32",
    "first_tile": "*i64",
    "flag": "*i32",
    "found": "*i32",
    "hist": "*i32",
    "indices": "*i32",
    "key_table": "*i64",
    "level_table": "*fp32",
    "limits": "*fp32",
    "m": "fp32",
    "marks": "*u8",
    "nbytes": "i64",
    "num_blocks": "i32",
    "num_buckets": "i32",
    "num_payloads": "i32",
    "num_segments": "i32",
    "num_tiles": "i32",
    "others": "*i64",
    "out": "*u8",
    "payload": "*u8",
    "payloads": "*i64",
    "rows": "*i64",
    "scales": "*fp32",
    "search_steps": "i32",
    "sources": "*i64",
    "sums": "*fp64",
    "totals": "*i32",
    "values": "*fp32",
    "weight": "fp32",
    "words": "*i32",
}


@dataclass(frozen=True)
class Variant:
    """One kernel with one choice of constants.

    Args:
        name: `family.kernel: constants`, unique.
        function: the `triton.jit` function.
        constants: its arguments of type `tl.constexpr`, and those that are None.
        numel: elements of the segments that one program serves.
        least_bytes: per element, the least to read and write: each input once, each output once.
        cached_bytes: per element, what the program reads a second time, then from the cache.
        launches: of the whole operation.
        loop_trips: how often the program runs its loop over elements, if it has one.
        types: of run-time arguments that differ from `TYPES`.
    """

    name: str
    function: Any
    constants: Mapping[str, Any]
    numel: int
    least_bytes: float
    cached_bytes: float = 0.0
    launches: int = 1
    loop_trips: int = 1
    types: Mapping[str, str] = field(default_factory=dict)

    @property
    def signature(self) -> dict[str, str]:
        """The type of each argument."""
        types = {**TYPES, **self.types, **dict.fromkeys(self.constants, "constexpr")}
        return {name: types[name] for name in self.function.arg_names}


VARIANTS: list[Variant] = []
