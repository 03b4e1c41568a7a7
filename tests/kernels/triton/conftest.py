"""The checks run by file name, with `make test-triton` or on a GPU, and are not collected with the other tests."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

collect_ignore_glob = ["check_*.py"]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(autouse=INTERPRETED)
def without_work_that_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the interpreter's time: it computes whether integers overflow, for assertions that it leaves out unless it
    debugs, and at each call of a device function it patches the language, which the kernel's launch has patched.
    """
    from triton.runtime import interpreter

    options = interpreter.interpreter_builder.options
    assert not options.debug
    monkeypatch.setattr(
        interpreter.interpreter_builder, "options", dataclasses.replace(options, sanitize_overflow=False)
    )

    patch, launch, patched = interpreter._patch_lang, interpreter.GridExecutor.__call__, set[int]()

    def patch_once(function: Any) -> object:
        if id(function.__globals__) in patched:
            return None
        patched.add(id(function.__globals__))
        return patch(function)

    def launch_once(self: Any, *arguments: Any, **named: Any) -> None:
        patched.clear()
        launch(self, *arguments, **named)

    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch_once)


@pytest.fixture(autouse=INTERPRETED)
def what_the_compiler_is_told_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter takes any address. A GPU faults where one is no multiple of a load's width.

    So each address must be a multiple of what `tl.multiple_of` says, and of the size of what its pointer points to.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _get_np_dtype

    original = TensorHandle.set_attr

    def set_attr(self: Any, key: str, value: Any) -> None:
        if key == "tt.divisibility":
            divisor = int(np.ravel(getattr(value, "value", value))[-1])
            assert not (self.data.astype(np.int64) % divisor).any(), f"{self.data} are no multiples of {divisor}"
        original(self, key, value)

    monkeypatch.setattr(TensorHandle, "set_attr", set_attr)

    def checked(access: Callable[..., object], which_mask: int) -> Callable[..., object]:
        def check(self: Any, pointers: Any, *arguments: Any) -> object:
            addresses = pointers.data[np.broadcast_to(arguments[which_mask].data, pointers.data.shape)]
            size = np.dtype(_get_np_dtype(pointers.get_element_ty())).itemsize
            assert not (addresses % size).any(), f"{addresses} are no multiples of {size}"
            return access(self, pointers, *arguments)

        return check

    for name, which_mask in {"create_masked_load": 0, "create_masked_store": 1}.items():
        monkeypatch.setattr(InterpreterBuilder, name, checked(getattr(InterpreterBuilder, name), which_mask))
