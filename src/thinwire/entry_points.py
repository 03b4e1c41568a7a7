"""What installed packages declare in groups of entry points: algorithms and exchanges by name."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

from .messages import error_place, error_text

T = TypeVar("T")


@cache
def declared(group: str) -> dict[str, importlib.metadata.EntryPoint]:
    """The entry points of a group by name, without loading them."""
    return {entry.name: entry for entry in importlib.metadata.entry_points(group=group)}


def load(entry: importlib.metadata.EntryPoint, check: Callable[[Any], T]) -> T:
    """What `check` makes of the object that an entry point names.

    Raises:
        ValueError: it cannot be loaded, or `check` refuses it.
    """
    try:
        return check(entry.load())
    except Exception as error:
        raise ValueError(
            f"the entry point {entry.name} = {entry.value!r} cannot be used: {error_text(error)}{error_place(error)}"
        ) from error
