"""Triton's interpreter on the simulated GPU, which keeps account of what kernels load and store; see `simulated_gpu.cpp`.

The interpreter takes what a GPU does not. Here it is an error if an address is no multiple of what `tl.multiple_of` says, or
of the size of what is loaded or stored there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle, interpreter_builder

SIMULATED = torch.ops.simulated_gpu
LOADS, STORES, CHANGES = range(3)


def install() -> None:
    """Have all kernels of this process interpreted, each in the memory of the simulated GPU and on its current stream."""
    leave_out_what_changes_nothing()
    GridExecutor._init_args_hst = on_host
    GridExecutor._restore_args_dev = lambda *arguments: None
    GridExecutor.__call__ = launched(GridExecutor.__call__)
    TensorHandle.set_attr = checked(TensorHandle.set_attr)
    for name, action, mask in (
        ("create_masked_load", LOADS, 1),
        ("create_masked_store", STORES, 2),
        ("create_atomic_rmw", CHANGES, 3),
    ):
        setattr(InterpreterBuilder, name, noted(getattr(InterpreterBuilder, name), action, mask))
    InterpreterBuilder.create_barrier = lambda self: SIMULATED.pass_barrier()
    set_place = InterpreterBuilder.set_grid_idx

    def begin_program(self: Any, *place: int) -> None:
        SIMULATED.begin_program(place[0])
        set_place(self, *place)

    InterpreterBuilder.set_grid_idx = begin_program


def leave_out_what_changes_nothing() -> None:
    """Half of the interpreter's time: it computes whether integers overflow, for assertions that it leaves out unless it
    debugs, and at each call of a device function it patches the language, which the kernel's launch has patched.
    """
    assert not interpreter_builder.options.debug
    interpreter_builder.options = dataclasses.replace(interpreter_builder.options, sanitize_overflow=False)
    patch = interpreter._patch_lang

    def patch_once(function: Any) -> object:
        if id(function.__globals__) in patched:
            return None
        patched.add(id(function.__globals__))
        return patch(function)

    interpreter._patch_lang = patch_once


patched = set[int]()  # by the kernel that runs


def launched(launch: Callable[..., None]) -> Callable[..., None]:
    def run(self: Any, *arguments: Any, **options: Any) -> None:
        patched.clear()
        SIMULATED.begin_kernel(self.fn.__name__)
        launch(self, *arguments, **options)
        SIMULATED.end_kernel()

    return run


def on_host(self: Any, arguments: Any, options: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The same memory as tensors of the CPU, where the interpreter would copy what the kernel gets, and back."""

    def moved(value: Any) -> Any:
        return SIMULATED.in_main_memory(value) if isinstance(value, torch.Tensor) else value

    return [moved(value) for value in arguments], {name: moved(value) for name, value in options.items()}


def noted(run: Callable[..., object], action: int, mask: int) -> Callable[..., object]:
    """The interpreter's operation, which tells first what it uses. `mask` is where its arguments have the mask."""

    def note(self: Any, *arguments: Any) -> object:
        pointers = arguments[1 if action == CHANGES else 0]
        places = pointers.data.ravel()
        lanes = np.flatnonzero(np.broadcast_to(arguments[mask].data, pointers.data.shape))
        addresses = places[lanes].astype(np.int64)
        size = np.dtype(interpreter._get_np_dtype(pointers.get_element_ty())).itemsize
        assert not (addresses % size).any(), f"{addresses} are no multiples of {size}"
        stored = np.empty(0, np.uint8)
        if action == STORES:
            stored = np.broadcast_to(arguments[1].data, pointers.data.shape).ravel()[lanes].view(np.uint8)
        tensors = [torch.from_numpy(array) for array in (lanes, addresses, stored)]
        SIMULATED.use_in_kernel(*tensors, places.size, size, action)
        return run(self, *arguments)

    return note


def checked(set_attr: Callable[..., None]) -> Callable[..., None]:
    def check(self: Any, key: str, value: Any) -> None:
        if key == "tt.divisibility":
            divisor = int(np.ravel(getattr(value, "value", value))[-1])
            assert not (self.data.astype(np.int64) % divisor).any(), f"{self.data} are no multiples of {divisor}"
        set_attr(self, key, value)

    return check
