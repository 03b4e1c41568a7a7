"""What a tool's own classes make of a file that was written for the tool."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def lost(written: Any, kept: Any, place: str = "") -> Iterator[str]:
    """The places where a file and what the classes write again differ: fields that they do not know are dropped.

    Defaults that the classes add do not count.
    """
    if isinstance(written, dict) and isinstance(kept, dict):
        for key, value in written.items():
            yield from lost(value, kept.get(key), f"{place}/{key}")
    elif isinstance(written, list) and isinstance(kept, list) and len(written) == len(kept):
        for i, (value, other) in enumerate(zip(written, kept, strict=True)):
            yield from lost(value, other, f"{place}/{i}")
    elif written != kept:
        yield place
