"""Algorithms are data: the base of every codec, memory, topology and averager.

An algorithm is a frozen dataclass. Its constructor is its configuration, equality is by value, and its `repr` is the
shortest Python that rebuilds it: fields at their default are left out, parts that are algorithms themselves stand first
and unnamed, everything else is named.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

if TYPE_CHECKING:
    from typing_extensions import Self  # of `typing` from Python 3.11 on

Value = TypeVar("Value")


class Algorithm:
    """Base of all frozen, comparable, printable configurations.

    Example:
        >>> import thinwire as tw
        >>> tw.Mean(tw.TopK(0.01), tw.ErrorFeedback())
        Mean(TopK(ratio=0.01), ErrorFeedback())
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]  # subclasses are dataclasses

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Refuse a class that is no frozen dataclass: it has no fields to print, compare or hash."""
        frozen = dataclasses.is_dataclass(cls) and cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
        require(
            frozen,
            f"{cls.__name__}: write @dataclass(frozen=True, repr=False) above the class; its fields are its options",
        )
        return super().__new__(cls)

    def __init_subclass__(cls, **options: Any) -> None:
        """Check bools in every subclass before its own checks, which take True for 1, and any text for True."""
        super().__init_subclass__(**options)
        own = vars(cls).get("__post_init__")
        if own is not None:

            @functools.wraps(own)
            def checked(self: Algorithm) -> None:
                _check_bools(self)
                own(self)
                _make_plain(self)

            cls.__post_init__ = checked  # type: ignore[method-assign]  # the same signature

    def __post_init__(self) -> None:
        _check_bools(self)
        _make_plain(self)

    @functools.cached_property
    def is_constant(self) -> bool:
        """Whether no field has a schedule, here or in an algorithm in a field; a field may be a tuple of them."""
        values = (getattr(self, field.name) for field in dataclasses.fields(self))
        return all(part.is_constant for value in values for part in _algorithms_in(value))

    @property
    def cautions(self) -> list[str]:
        """What is allowed but rarely meant: warnings for the user, a line each. Those of parts are their own."""
        return []

    def walk(self) -> Iterator[Algorithm]:
        """The algorithm and all algorithms in its fields.

        Example:
            >>> import thinwire as tw
            >>> [type(part).__name__ for part in tw.Mean(tw.TopK(0.01), tw.ErrorFeedback()).walk()]
            ['Mean', 'TopK', 'ErrorFeedback']
        """
        yield self
        for field in dataclasses.fields(self):
            yield from _algorithms_in(getattr(self, field.name))

    def __repr__(self) -> str:
        arguments, positional = [], True
        options = (field for field in dataclasses.fields(self) if field.init)
        # Keyword-only fields come last, as in the constructor.
        for field in sorted(options, key=lambda field: field.kw_only is True):
            value = getattr(self, field.name)
            if _is_default(field, value):
                positional = False
            elif positional and not field.kw_only and isinstance(value, Algorithm):
                arguments.append(repr(value))
            else:
                positional = False
                arguments.append(f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(arguments)})"


def _algorithms_in(value: object) -> Iterator[Algorithm]:
    if isinstance(value, Algorithm):
        yield from value.walk()
    elif isinstance(value, tuple):
        for item in value:
            yield from _algorithms_in(item)


def _check_bools(algorithm: Algorithm) -> None:
    """Raise ValueError if a bool is something else, or another field is True or False, or a tuple with one of them."""
    for field in dataclasses.fields(algorithm):
        value = getattr(algorithm, field.name)
        has_bool = isinstance(value, bool) or (isinstance(value, tuple) and any(isinstance(v, bool) for v in value))
        if has_bool and "bool" not in str(field.type):
            raise ValueError(f"{type(algorithm).__name__}: {field.name} must be of type {field.type}, got {value}")
        if field.type in ("bool", bool) and not isinstance(value, bool):
            raise ValueError(f"{type(algorithm).__name__}: {field.name} must be True or False, got {value!r}")


def _make_plain(algorithm: Algorithm) -> None:
    """Turn numbers of NumPy into Python's: their `repr` is no literal, so that `parse` could not read it."""
    for field in dataclasses.fields(algorithm):
        value = getattr(algorithm, field.name)
        if isinstance(value, (np.generic, tuple)):
            object.__setattr__(algorithm, field.name, _plain(value))


def _plain(value: Any) -> Any:
    if type(value) is tuple:
        return tuple(map(_plain, value))
    return value.item() if isinstance(value, np.generic) else value


def _is_default(field: dataclasses.Field[Any], value: object) -> bool:
    if field.default is not dataclasses.MISSING:
        return bool(field.default == value)
    return field.default_factory is not dataclasses.MISSING and bool(field.default_factory() == value)


def require(condition: bool, message: str) -> None:
    """Raise the user's mistake as a `ValueError`."""
    if not condition:
        raise ValueError(message)


@contextlib.contextmanager
def able_to(do: str, remedy: str) -> Iterator[None]:
    """Context in which an OSError is the user's mistake: a ValueError says what cannot be done, why, and the remedy.

    Example:
        >>> with able_to("write to runs", "choose another folder"):
        ...     raise OSError(28, "No space left on device")
        Traceback (most recent call last):
        ValueError: cannot write to runs: No space left on device; choose another folder
    """
    try:
        yield
    except OSError as error:
        raise ValueError(f"cannot {do}: {error.strerror or error}; {remedy}") from None


def required(value: Value | None, message: str) -> Value:
    """The value, where None is the user's mistake."""
    if value is None:
        raise ValueError(message)
    return value
