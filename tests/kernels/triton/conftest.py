"""The checks run by file name, with `make test-triton` or on a GPU, and are not collected with the other tests."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

collect_ignore_glob = ["check_*.py"]


@pytest.fixture(autouse=True)
def what_the_compiler_is_told_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter takes any address; a GPU faults where one is no multiple of what `tl.multiple_of` says."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime.interpreter import TensorHandle

    original = TensorHandle.set_attr

    def set_attr(self: Any, key: str, value: Any) -> None:
        if key == "tt.divisibility":
            divisor = int(np.ravel(getattr(value, "value", value))[-1])
            assert not (self.data.astype(np.int64) % divisor).any(), f"{self.data} are no multiples of {divisor}"
        original(self, key, value)

    monkeypatch.setattr(TensorHandle, "set_attr", set_attr)
