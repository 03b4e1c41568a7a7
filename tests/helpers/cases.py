"""Loops over cases inside one test: one test per property is quicker to collect and run than one per case."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def case(*names: object) -> Iterator[None]:
    """Names the case of a loop in the error of the first one that fails.

    Example:
        >>> with case("Ring()", 8):
        ...     assert 1 + 1 == 3
        Traceback (most recent call last):
        AssertionError: case Ring(), 8: ...
    """
    try:
        yield
    except Exception as error:
        raise AssertionError(f"case {', '.join(map(str, names))}: {type(error).__name__}: {error}") from error
