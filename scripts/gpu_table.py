"""Print the table of GPU kernels that docs/gpu.md shows: compiled without a GPU, with Triton alone.

python scripts/gpu_table.py [TARGET ...]        by default for all targets
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers.triton_code import TARGETS, bytes_per_element, compile_variant, instructions_per_element
from helpers.triton_variants import VARIANTS

from thinwire.suggestion import suggestion


def table(targets: list[str]) -> str:
    """Markdown: per kernel its launches, registers and spills for each target; instructions and bytes an element."""
    lines = [
        f"| kernel | launches | registers: {', '.join(targets)} | spills | instructions | bytes loaded, stored | least |",
        "|---|---|---|---|---|---|---|",
    ]
    for variant in VARIANTS:
        codes = {target: compile_variant(variant, target) for target in targets}
        registers = ", ".join(str(code.registers) for code in codes.values())
        spills = sum(code.spills for code in codes.values())
        code = next(code for target, code in codes.items() if target.startswith("sm_"))
        instructions = instructions_per_element(variant, code)
        loaded, stored = bytes_per_element(variant, code.text)
        again = f" (+ {variant.cached_bytes:g} from the cache)" if variant.cached_bytes else ""
        lines.append(
            f"| {variant.name} | {variant.launches} | {registers} | {spills} | {instructions:.1f} | {loaded:.2f}, {stored:.2f} "
            f"| {variant.least_bytes:.2f}{again} |"
        )
    return "\n".join(lines)


def asked_targets(asked: list[str]) -> list[str]:
    """The targets, if there are such and their table has all columns; else it exits with one line."""
    for target in asked:
        if target not in TARGETS:
            sys.exit(f"unknown target {target!r}{suggestion(target, TARGETS)}")
    if not any(target.startswith("sm_") for target in asked):
        sys.exit("instructions and bytes are counted in NVIDIA's code; name one of its targets too, such as sm_90")
    return asked


if __name__ == "__main__":
    print(table(asked_targets(sys.argv[1:] or list(TARGETS))))
