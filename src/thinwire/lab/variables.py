"""Variables of the environment for a while."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def variables_set(variables: Mapping[str, str]) -> Iterator[None]:
    """Context in which this process and the children that it starts have these variables.

    Example:
        >>> with variables_set({"A_VARIABLE": "1"}):
        ...     os.environ["A_VARIABLE"]
        '1'
        >>> "A_VARIABLE" in os.environ
        False
    """
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
