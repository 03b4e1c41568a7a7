"""How many functions a piece of work calls: what it costs in Python, of which machine and load change nothing."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any


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
