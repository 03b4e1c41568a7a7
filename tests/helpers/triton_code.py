"""Compile kernels without a GPU, and read registers, spills and inexact instructions from the machine code."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from helpers.triton_variants import Variant
from thinwire.kernels.triton.launch import OPTIONS

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx90a": GPUTarget("hip", "gfx90a", 64),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_THREADS: int = 32 * OPTIONS["num_warps"]
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"  # comes with Triton


@dataclass(frozen=True)
class Compiled:
    """A kernel's code for one target.

    Args:
        text: PTX for NVIDIA, assembly for AMD.
        registers: per thread.
        spills: registers, or bytes on NVIDIA, that a thread keeps in memory.
        cubin: machine code for NVIDIA, in a file of the format ELF; empty for AMD.
    """

    text: str
    registers: int
    spills: int
    cubin: bytes = b""

    @cached_property
    def machine_code(self) -> str:
        """The instructions for NVIDIA, one in a line, after their addresses. To read them takes a quarter of a second."""
        return _cuobjdump(self.cubin, "--dump-sass")


def compile_variant(variant: Variant, target: str) -> Compiled:
    """Compile for one of `TARGETS`."""
    names = variant.function.arg_names
    source = ASTSource(
        fn=variant.function,
        signature=variant.signature,
        constexprs={(names.index(name),): value for name, value in variant.constants.items()},
    )
    code = triton.compile(source, target=TARGETS[target], options=OPTIONS).asm
    if "ptx" in code:
        return Compiled(code["ptx"], *_usage(code["cubin"]), code["cubin"])
    text = code["amdgcn"]
    usage = dict(re.findall(r"\.(vgpr_count|vgpr_spill_count): *(\d+)", text))
    return Compiled(text, int(usage["vgpr_count"]), int(usage["vgpr_spill_count"]))


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes that it keeps in memory."""
    report = _cuobjdump(cubin, "--dump-resource-usage")
    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", report))
    return int(usage["REG"]), int(usage["STACK"]) + int(usage["LOCAL"])


def _cuobjdump(cubin: bytes, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(CUOBJDUMP), option, file.name], check=True, capture_output=True, text=True).stdout


# What rounds otherwise than the reference: contraction, approximate functions, subnormal numbers taken for zero.
INEXACT = re.compile(r"\b(?:fma\.\S+|\S+\.(?:approx|full|ftz)\b\S*)")


def inexact_instructions(ptx: str) -> list[str]:
    """All instructions whose results may differ from the reference's."""
    return INEXACT.findall(ptx)


def bytes_per_element(variant: Variant, ptx: str) -> tuple[float, float]:
    """Bytes that a program loads and stores per element, counted from its PTX.

    Every thread is counted for every instruction, also where a mask leaves some out: an upper bound. Loads of one 64-bit
    number come from tables, and all threads read the same one: they do not count. Of loads by one thread from one address,
    which the assembler merges, the first counts.
    """
    loaded = stored = 0.0
    lines = ptx.splitlines()
    in_loop = _lines_in_loops(lines)
    seen: set[str] = set()
    for i, line in enumerate(lines):
        access = re.search(r"\b(ld|st)\.global\S*?(?:\.v(\d))?\.b(\d+)\b", line)
        if access is None or (access[1], access[2], access[3]) == ("ld", None, "64"):
            continue
        address = line[line.rindex("[") :]
        if access[1] == "ld" and address in seen:
            continue
        seen.add(address)
        nbytes = int(access[2] or 1) * int(access[3]) // 8 * _THREADS * (variant.loop_trips if in_loop[i] else 1)
        if access[1] == "ld":
            loaded += nbytes
        else:
            stored += nbytes
    return loaded / variant.numel, stored / variant.numel


def _lines_in_loops(lines: list[str]) -> list[bool]:
    """Whether each line lies between a label and a later jump back to it."""
    labels = {match[1]: i for i, line in enumerate(lines) if (match := re.match(r"(\$\w+):", line))}
    inside = [False] * len(lines)
    for i, line in enumerate(lines):
        jump = re.search(r"\bbra\S*\s+(\$\w+)", line)
        if jump and labels.get(jump[1], i) < i:
            inside[labels[jump[1]] : i] = [True] * (i - labels[jump[1]])
    return inside


def instructions_per_element(variant: Variant, code: Compiled) -> float:
    """Machine instructions that a program's threads execute per element, on NVIDIA.

    The loop over elements counts as often as it runs: `variant.loop_trips` times, less where the assembler unrolled it. It
    is the loop with the most loads of elements. Of the loops without such loads the longest counts `variant.passes` times.
    All else counts once: the search for the segment in the table, and what only some programs execute.
    """
    count, loop = len(_machine_lines(code)), element_loop(code)
    num_loads = _num_loads(loop)
    if num_loads and variant.loop_trips > 1:
        count += len(loop) * (max(1, variant.loop_trips * _loads_in_loops(code.text) // num_loads) - 1)
    count += (variant.passes - 1) * max((len(each) for each in _loops(code) if not _num_loads(each)), default=0)
    return count * _THREADS / variant.numel


def instructions_of_a_trip(variant: Variant, code: Compiled) -> float:
    """Machine instructions per element of each run of the loop over elements: in a decoder, those of a further payload."""
    return len(element_loop(code)) * _THREADS / variant.numel


def element_loop(code: Compiled) -> list[str]:
    """The instructions of the loop that has the most loads of elements; nothing if there is no loop."""
    return max(_loops(code), key=lambda loop: (_num_loads(loop), len(loop)), default=[])


def _loops(code: Compiled) -> list[list[str]]:
    lines = _machine_lines(code)
    loops = []
    for at, text in lines:
        jump = re.search(r"\bBRA\S* (?:\S+, )?0x([0-9a-f]+)", text)
        if jump and int(jump[1], 16) < at:
            loops.append([inner for i, inner in lines if int(jump[1], 16) <= i <= at])
    return loops


def _machine_lines(code: Compiled) -> list[tuple[int, str]]:
    """Addresses and texts of the machine instructions, without the padding at the end."""
    found = re.findall(r"/\*([0-9a-f]{4,})\*/ +([^;]*);", code.machine_code)
    return [(int(at, 16), text) for at, text in found if not text.startswith(("NOP", f"BRA 0x{at.lstrip('0')} "))]


def _num_loads(lines: list[str]) -> int:
    """Loads of elements: those of one 64-bit number come from tables."""
    return sum(bool(re.search(r"\bLDG\.E(?!\.64)", line)) for line in lines)


def _loads_in_loops(ptx: str) -> int:
    """Loads of elements in loops, each address once."""
    lines = ptx.splitlines()
    loads = {
        line[line.rindex("[") :]
        for line, inside in zip(lines, _lines_in_loops(lines), strict=True)
        if inside and "ld.global" in line and ("b64" not in line or ".v" in line)
    }
    return len(loads)
