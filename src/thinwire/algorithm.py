"""Algorithms are data: the base of every codec, memory, topology and averager.

An algorithm is a frozen dataclass. Its constructor is its configuration, equality is by value, and its `repr` is the
shortest Python that rebuilds it: fields at their default are left out, parts that are algorithms themselves stand first
and unnamed, everything else is named.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar


class Algorithm:
    """Base of all frozen, comparable, printable configurations.

    Example:
        >>> import thinwire as tw
        >>> tw.Mean(tw.TopK(0.01), tw.ErrorFeedback())
        Mean(TopK(ratio=0.01), ErrorFeedback())
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]  # subclasses are dataclasses

    def __repr__(self) -> str:
        arguments, positional = [], True
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if _is_default(field, value):
                positional = False
            elif positional and isinstance(value, Algorithm):
                arguments.append(repr(value))
            else:
                positional = False
                arguments.append(f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(arguments)})"


def _is_default(field: dataclasses.Field[Any], value: object) -> bool:
    if field.default is not dataclasses.MISSING:
        return bool(field.default == value)
    return field.default_factory is not dataclasses.MISSING and bool(field.default_factory() == value)


def require(condition: bool, message: str) -> None:
    """Raise the user's mistake as a `ValueError`."""
    if not condition:
        raise ValueError(message)
