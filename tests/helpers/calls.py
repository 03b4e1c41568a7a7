"""How many functions, or operations of PyTorch, a piece of work calls: machine and load change nothing of it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


def num_calls(act: Callable[[], Any]) -> int:
    """Calls of functions, those in C too, once all tables are kept."""
    act()
    calls = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    gc.collect()
    gc.disable()  # it would end what other tests have left
    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(before)
        gc.enable()
    return calls


class Operations(TorchDispatchMode):
    """Counts the operations in its context but for views: the launches of a GPU, or more."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += not func.is_view
        return func(*args, **(kwargs or {}))
