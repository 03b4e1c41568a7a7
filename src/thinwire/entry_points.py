"""What installed packages declare in groups of entry points: algorithms and exchanges by name."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, TypeVar

from .algorithm import require
from .messages import error_place, error_text, log

T = TypeVar("T")


@cache
def declared(group: str) -> dict[str, importlib.metadata.EntryPoint]:
    """The entry points of a group by name, without loading them."""
    return {entry.name: entry for entry in importlib.metadata.entry_points(group=group)}


def load(entry: importlib.metadata.EntryPoint, check: Callable[[Any], T]) -> T:
    """What `check` makes of the object that an entry point names.

    Raises:
        ValueError: it cannot be loaded, another package declares another object by its name, or `check` refuses it.
    """
    try:
        values = {one.value for one in importlib.metadata.entry_points(group=entry.group, name=entry.name)}
        # Which one would be taken depends on the order of folders, and so on the machine.
        require(len(values) < 2, f"packages declare it as {' and as '.join(sorted(values))}; uninstall all but one")
        return check(entry.load())
    except Exception as error:
        raise ValueError(
            f"the entry point {entry.name} = {entry.value!r} cannot be used: {error_text(error)}{error_place(error)}"
        ) from error


def usable(names: Iterable[str], find: Callable[[str], T]) -> dict[str, T]:
    """What `find` returns for each name. An entry point that cannot be loaded is left out, with a warning that says why."""
    found: dict[str, T] = {}
    for name in names:
        try:
            found[name] = find(name)
        except ValueError as error:
            log.warning(error)
    return found
