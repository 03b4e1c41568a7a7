"""Triton without a GPU: a launch compiles its kernel for the real types of its arguments, and runs nothing. Tensors are on
the simulated GPU.

Triton's interpreter takes what its compiler refuses, such as a variable that changes its type. Here every launch of a check
is compiled to Triton's intermediate representation. Memory that kernels would have written holds zeros, so what a check
finds in it says nothing: a check passes if everything that it launches compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime import jit
from triton.runtime.driver import driver

TARGET = GPUTarget("cuda", 90, 32)

is_installed = False

compiled: dict[tuple[Any, str], str] = {}
"""What the compiler said of each kernel, by function and types: "" if nothing."""

launched: list[tuple[Any, str]] = []
"""What the current check has launched."""

failed: list[str] = []
"""What Triton raised in launches of the current check."""


class FakeDriver:
    """An H100, as far as the compiler asks."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda")


def install() -> None:
    """Have all launches of this process compile only."""
    global is_installed
    from thinwire.kernels import backend

    is_installed = True
    backend.BACKENDS["cuda"] = "triton"
    driver.set_active(FakeDriver())
    triton.knobs.runtime.jit_cache_hook = _compile_only
    jit.serialize_specialization_data = lambda *arguments: ""  # for the hook; 3.6 fails at constants that are functions
    jit.JITFunction.run = _note_errors(jit.JITFunction.run)
    torch.empty = torch.zeros
    torch.empty_like = torch.zeros_like
    _changes_a_type[(1,)](7)
    assert problems(), "what the compiler refuses is not noticed; has Triton's hook changed?"


@triton.jit
def _changes_a_type(count):
    if count > 1:
        count = tl.full([], 1, tl.int64)


def problems() -> list[str]:
    """What Triton and its compiler refused of all that was launched since the last call."""
    found = [f"{function.__name__}: {compiled[function, key]}" for function, key in launched if compiled[function, key]]
    found += failed
    launched.clear()
    failed.clear()
    return found


def _note_errors(run: Callable[..., Any]) -> Callable[..., Any]:
    def noting(function: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return run(function, *arguments, **options)
        except Exception as error:
            failed.append(f"{function.__name__}: {error!r}")
            raise

    return noting


def _compile_only(*, fn: Any, key: str, compile: dict[str, Any], **rest: Any) -> bool:
    """Triton's hook before it compiles a kernel; True makes it start nothing."""
    launched.append((fn.jit_function, key))
    if launched[-1] not in compiled:
        compiled[launched[-1]] = ""
        try:
            _make_ir(fn.jit_function, compile)
        except Exception as error:
            compiled[launched[-1]] = f"{error.__cause__ or error} {compile['signature']}"
    return True


def _make_ir(function: Any, compile: dict[str, Any]) -> None:
    backend, (attributes,) = make_backend(TARGET), compile["configs"]
    source = ASTSource(function, compile["signature"], compile["constants"], attributes)
    options = backend.parse_options(
        {"num_warps": compile["num_warps"], "enable_fp_fusion": compile["enable_fp_fusion"]}
    )
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source.make_ir(TARGET, options, backend.get_codegen_implementation(options), backend.get_module_map(), context)
