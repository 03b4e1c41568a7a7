"""Sets fields of nested dataclasses by path, with the values of a sweep's file.

A path has field names with dots between them, such as `optimizer.schedule.shape`. If a field can be one of several dataclasses
(`optimizer` is an `SGD` or an `Adam`), the path `optimizer.kind` chooses one by name; its other fields then start at their
defaults. Values are those of TOML and JSON: text, numbers, true and false, lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ...algorithm import require
from ...notation import suggestion

KIND = "kind"
EXPECTED = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path, as text"}


def overridden(config: Any, values: Mapping[str, Any]) -> Any:
    """A copy of `config` with these values at these field paths.

    Args:
        config: a frozen dataclass.
        values: field path -> value, as `flat` makes it.

    Raises:
        ValueError: one line; an unknown field, a value of the wrong type or out of range.

    Example:
        >>> from thinwire.lab.train import RunConfig
        >>> config = overridden(RunConfig("digits"), {"seed": 1, "optimizer.learning_rate": 0.1})
        >>> config.seed, config.optimizer.learning_rate
        (1, 0.1)
    """
    return _replaced(config, _nested(values), ())


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *parents, name = path.split(".")
        node = tree
        for depth, parent in enumerate(parents):
            node = node.setdefault(parent, {})
            require(isinstance(node, dict), f"{path} and {'.'.join(parents[: depth + 1])} cannot both be given")
        require(name not in node, f"{path} cannot be given together with one of its own fields")
        node[name] = value
    return tree


def _replaced(node: Any, tree: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    """`node` with the values of `tree`; `path` leads to it."""
    hints = get_type_hints(type(node))
    known = {field.name for field in fields(node)}
    changes = {}
    for name, value in tree.items():
        here = (*path, name)
        paths = [".".join((*path, other)) for other in known]
        require(name in known, f"unknown field {'.'.join(here)!r}{suggestion('.'.join(here), paths)}")
        current = getattr(node, name)
        if isinstance(value, Mapping):
            require(is_dataclass(current), f"{'.'.join(here)} has no fields; it is {current!r}")
            begin = _of_kind(current, value[KIND], hints[name], here) if KIND in value else current
            changes[name] = _replaced(begin, {key: item for key, item in value.items() if key != KIND}, here)
        else:
            changes[name] = converted(value, hints[name], ".".join(here))
    return replace(node, **changes)


def _of_kind(current: Any, name: Any, hint: Any, path: tuple[str, ...]) -> Any:
    """The current dataclass if it is of this kind, else a new one with its defaults."""
    members = (*_members(hint), type(current))
    kinds = {kind.__name__: kind for kind in members if isinstance(kind, type) and is_dataclass(kind)}
    require(name in kinds, f"unknown {'.'.join(path)}.{KIND} {name!r}{suggestion(str(name), kinds)}")
    return current if type(current) is kinds[name] else kinds[name]()


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def converted(value: Any, hint: Any, path: str) -> Any:
    """Convert a TOML value to the type of a field.

    A single value becomes a tuple of one; "none" becomes None, which TOML does not have and JSON calls null.

    Raises:
        ValueError: the value has another type; the message names the expected one.

    Example:
        >>> converted(1, float, "shuffled"), converted(0.1, tuple[float, ...], "step_sizes")
        (1.0, (0.1,))
    """
    for member in _members(hint):
        accepted, result = _accepted(value, member, path)
        if accepted:
            return result
    raise ValueError(f"{path} must be {expected(hint)}, got {value!r}{_nearest(value, hint)}")


def _accepted(value: Any, hint: Any, path: str) -> tuple[bool, Any]:
    """Whether a value fits this type, and the converted value."""
    if hint is Any:
        return True, value
    if hint is NoneType:
        return value in (None, "none", "None"), None
    if hint is Path:
        return isinstance(value, str), Path(str(value))
    if hint is float:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return number, float(value) if number else None
    if hint in EXPECTED:
        return type(value) is hint, value
    if get_origin(hint) is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(hint)), value
    if get_origin(hint) is tuple:
        return True, _as_tuple(value if isinstance(value, list) else [value], get_args(hint), path)
    return False, None


def _as_tuple(items: list[Any], hints: tuple[Any, ...], path: str) -> tuple[Any, ...]:
    if hints[1:] == (...,):
        hints = (hints[0],) * len(items)
    require(len(items) == len(hints), f"{path} must be a list of {len(hints)} values, got {items!r}")
    return tuple(converted(item, hint, f"{path}[{i}]") for i, (item, hint) in enumerate(zip(items, hints, strict=True)))


def expected(hint: Any) -> str:
    """A type in words.

    Example:
        >>> expected(int | None), expected(Literal["even", "by-class"])
        ("a whole number or 'none'", "one of 'even', 'by-class'")
    """
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(repr, get_args(hint)))}"
    if get_origin(hint) in (Union, UnionType) and not any(map(is_dataclass, get_args(hint))):
        return " or ".join(expected(member) for member in get_args(hint))
    if any(map(is_dataclass, _members(hint))):
        return f"a table; choose with .{KIND} one of {', '.join(kind.__name__ for kind in _members(hint))}"
    return "'none'" if hint is NoneType else EXPECTED.get(hint, "a list")


def _nearest(value: Any, hint: Any) -> str:
    choices = [choice for choice in get_args(hint) if isinstance(choice, str)] if get_origin(hint) is Literal else []
    near = suggestion(value, choices) if isinstance(value, str) and choices else ""
    return near if "did you mean" in near else ""
