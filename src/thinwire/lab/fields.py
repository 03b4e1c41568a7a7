"""Fields of a nested configuration, by the paths that name them on the command line, in sweeps and in reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

OF_THE_FOLDER = frozenset("output name suffix overwrite resume requeue keep wandb mlflow".split())
"""Options of a run that say where its results go, and not what it computes."""
OF_CONNECTIONS = frozenset(
    "elastic min_workers lighthouse first_worker transport interface credentials listen relay port timeout".split()
)
"""Options of a run that say how its workers reach each other."""


def flat(table: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Field paths and values of nested tables; dotted keys, nested tables and both together mean the same.

    Example:
        >>> dict(flat({"optimizer": {"learning_rate": 0.1}, "optimizer.momentum": 0.0}))
        {'optimizer.learning_rate': 0.1, 'optimizer.momentum': 0.0}
    """
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flat(value, (*path, key))
        else:
            yield ".".join((*path, key)), value
