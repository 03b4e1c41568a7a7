"""Print the table of GPU kernels that docs/gpu.md shows: compiled without a GPU, with Triton alone.

python scripts/gpu_table.py [TARGET ...]        by default for all targets
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers.triton_code import TARGETS, bytes_per_element, compile_variant, instructions_per_element
from helpers.triton_variants import VARIANTS


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


if __name__ == "__main__":
    print(table(sys.argv[1:] or list(TARGETS)))
