"""Sets fields of nested configurations by path, with the values of TOML files and of the command line.

A path has field names with dots between them, such as `optimizer.schedule.shape`.

- If a field can be one of several dataclasses (an `Optimizer` is an `SGD` or an `Adam`), the path `optimizer.kind` chooses one
  by name; its other fields then start at their defaults. All dataclasses that are derived from the field's type can be chosen.
- If a field is the notation of an algorithm, the path goes on through the algorithm's parts: `strategy.averager.codec.ratio`.
  A part that is an algorithm is notation too: `strategy.averager.codec = "TopK(0.01)"`. The whole and parts of it may be given
  together.

Values are those of TOML and JSON: text, numbers, true and false, lists.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ..algorithm import Algorithm, require
from ..notation import arguments, parse
from ..suggestion import nearest, suggestion

KIND = "kind"
WHOLE = ""  # in a tree of values, the key of the value of a field that is given in parts too
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
        >>> config = RunConfig("digits", "Local(Mean(TopK(0.01)), every=4)")
        >>> overridden(config, {"strategy.averager.codec.ratio": 0.001, "strategy.every": 8}).strategy
        'Local(averager=Mean(codec=TopK(ratio=0.001)), every=8)'
    """
    return _replaced(config, _nested(values), ())


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as a tree. A field that is given as a whole and in parts has its whole value under `WHOLE`."""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *parents, name = path.split(".")
        node = tree
        for parent in parents:
            if not isinstance(node.setdefault(parent, {}), dict):
                node[parent] = {WHOLE: node[parent]}
            node = node[parent]
        if name in node:
            node[name][WHOLE] = value
        else:
            node[name] = value
    return tree


def _replaced(node: Any, tree: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    """`node` with the values of `tree`; `path` leads to it."""
    hints = _hints(type(node))
    known = [field.name for field in fields(node)]
    changes = {}
    for name, value in tree.items():
        here = (*path, name)
        _check_known(here, known, type(node).__name__ if isinstance(node, Algorithm) else "")
        changes[name] = _changed(getattr(node, name), value, hints[name], here)
    return replace(node, **changes)


def _hints(build: Any) -> dict[str, Any]:
    """The types of a dataclass's fields, or of a function's parameters."""
    return get_type_hints(build, localns={"KW_ONLY": type(KW_ONLY)})  # Python 3.10 refuses `KW_ONLY`, which is no type


def _changed(current: Any, value: Any, hint: Any, path: tuple[str, ...]) -> Any:
    """The value of a field after a change of all of it, or of its own fields."""
    where = ".".join(path)
    if not isinstance(value, Mapping):
        return converted(value, hint, where)
    parts = dict(value)
    begin = converted(parts.pop(WHOLE), hint, where) if WHOLE in parts else current
    if isinstance(begin, str):
        return _changed_text(begin, parts, path)
    if isinstance(begin, tuple) and begin and all(isinstance(item, str) for item in begin):
        return tuple(_changed_text(item, parts, path) for item in begin)
    require(is_dataclass(begin), f"{where} has no fields; it is {begin!r}")
    if KIND in parts and not isinstance(begin, Algorithm):
        begin = _of_kind(begin, parts.pop(KIND), hint, path)
    return _replaced(begin, parts, path)


def _changed_text(text: str, tree: Mapping[str, Any], path: tuple[str, ...]) -> str:
    """The notation of an algorithm after changes of its parts.

    A name is an argument of the text's own call if it can be: `dgc(0.001)` has `values`, which the `Mean` that it builds does
    not have. Else it is a field of what the call builds.
    """
    try:
        build, given = arguments(text)
    except ValueError:
        raise ValueError(f"{'.'.join(path)} has no fields; it is {text}") from None
    built, hints, parameters = parse(text), _hints(build), inspect.signature(build).parameters
    known = list(dict.fromkeys([*parameters, *(field.name for field in fields(built))]))
    rest = {}
    for name, value in tree.items():
        if name not in parameters:
            rest[name] = value
            continue
        default = getattr(built, name) if isinstance(build, type) else parameters[name].default
        given[name] = _changed_argument(given.get(name, repr(default)), value, hints[name], (*path, name))
    for name in rest:
        _check_known((*path, name), known, build.__name__)
    if tree.keys() != rest.keys():
        text = f"{build.__name__}({', '.join(f'{name}={argument}' for name, argument in given.items())})"
        try:
            built = parse(text)
        except ValueError as error:
            raise ValueError(f"{'.'.join(path)}: {error}") from None
    return repr(_replaced(built, rest, path)) if rest else text


def _changed_argument(text: str, value: Any, hint: Any, path: tuple[str, ...]) -> str:
    if isinstance(value, Mapping):
        parts = dict(value)
        if WHOLE in parts:
            text = _changed_argument(text, parts.pop(WHOLE), hint, path)
        return _changed_text(text, parts, path)
    read = converted(value, hint, ".".join(path))
    return value if isinstance(read, Algorithm) else repr(read)  # as it is written, such as "dgc(0.001)"


def _check_known(path: tuple[str, ...], known: Sequence[str], kind: str = "") -> None:
    """Check the last name of a path; the error for an algorithm of this kind lists the names that it has."""
    *parents, name = path
    if kind:
        near = f"; {kind} has {', '.join(known) or 'no fields'}"
    else:
        near = suggestion(".".join(path), [".".join((*parents, other)) for other in known])
    require(name in known, f"unknown field {'.'.join(path)!r}{near}")


def _of_kind(current: Any, name: Any, hint: Any, path: tuple[str, ...]) -> Any:
    """The current dataclass if it is of this kind, else a new one with its defaults."""
    kinds = {kind.__name__: kind for kind in (*_kinds(hint), type(current))}
    require(str(name) in kinds, f"unknown {'.'.join(path)}.{KIND} {name!r}{suggestion(str(name), kinds)}")
    kind = kinds[name]
    if type(current) is kind:
        return current
    alike = [f"{one.__module__}.{name}" for one in dict.fromkeys(_kinds(hint)) if one.__name__ == name]
    require(
        len(alike) < 2,
        f"several kinds are called {name!r}: {', '.join(alike)}; take a recipe that has the one you mean",
    )
    needed = [
        item.name for item in fields(kind) if item.init and item.default is MISSING and item.default_factory is MISSING
    ]
    require(
        not needed,
        f"{'.'.join(path)}.{KIND} {name!r} has no default for {', '.join(needed)}; take a recipe that has one",
    )
    return kind()


def value_of(word: str) -> Any:
    """A value of the command line as TOML would have it.

    Example:
        >>> [value_of(word) for word in ("0.001", "true", "none", "all_gather", "QSGD(bits=4)")]
        [0.001, True, 'none', 'all_gather', 'QSGD(bits=4)']
    """
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    try:
        value = ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word
    return word if value is None else value


def _kinds(hint: Any) -> Iterator[Any]:
    """All dataclasses of a type that can be made, in the order in which they were defined."""
    for member in _members(hint):
        if is_dataclass(member) and not inspect.isabstract(member):
            yield member
        if isinstance(member, type):
            below: list[type[Any]] = member.__subclasses__()
            yield from (kind for subclass in below for kind in _kinds(subclass))


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
    for member in sorted(_members(hint), key=lambda member: member is not NoneType):  # "none" is no algorithm
        accepted, result = _accepted(value, member, path)
        if accepted:
            return result
    raise ValueError(f"{path} must be {expected(hint)}, got {value!r}{_nearest(value, hint)}")


def _accepted(value: Any, hint: Any, path: str) -> tuple[bool, Any]:
    """Whether a value fits this type, and the converted value."""
    if hint is Any:
        return True, value
    if isinstance(hint, type) and issubclass(hint, Algorithm):
        return _accepted_algorithm(value, hint, path)
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
    if get_origin(hint) in (Callable, Mapping, Sequence):  # the algorithm that has the field checks the rest
        return True, _read(value, path) if isinstance(value, str) else value
    if get_origin(hint) is tuple:
        return True, _as_tuple([*value] if isinstance(value, (list, tuple)) else [value], get_args(hint), path)
    return False, None


def _accepted_algorithm(value: Any, kind: type[Algorithm], path: str) -> tuple[bool, Any]:
    if not isinstance(value, str):
        return isinstance(value, kind), value
    read = _read(value, path)
    return isinstance(read, kind), read


def _read(text: str, path: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


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
    if get_origin(hint) in (Union, UnionType) and not any(map(_is_table, get_args(hint))):
        return " or ".join(expected(member) for member in get_args(hint))
    if isinstance(hint, type) and issubclass(hint, Algorithm):
        return f"a {hint.__name__.lower()} in Python's notation"
    if any(map(_is_table, _members(hint))):
        return f"a table; choose with .{KIND} one of {', '.join(kind.__name__ for kind in _kinds(hint))}"
    return "'none'" if hint is NoneType else EXPECTED.get(hint, "a list")


def _is_table(hint: Any) -> bool:
    is_own = isinstance(hint, type) and not issubclass(hint, Algorithm)
    return is_own and (is_dataclass(hint) or inspect.isabstract(hint))


def _nearest(value: Any, hint: Any) -> str:
    choices = [choice for choice in get_args(hint) if isinstance(choice, str)] if get_origin(hint) is Literal else []
    return nearest(value, choices) if isinstance(value, str) and value not in choices else ""
