"""One notation for Python, the command line, saved runs and sweeps: `parse(repr(x)) == x`.

`parse` walks the syntax tree of the text. It understands calls of known names, literals, and lists, tuples and
dicts of these. Anything else is an error that names the column. Nothing is ever evaluated.

Known names are the library's algorithms, those passed to `register`, and those that installed packages declare in the
entry-point group `thinwire.algorithms`:

    [project.entry-points."thinwire.algorithms"]
    Natural = "my_package.natural:Natural"

An entry point is loaded when its name is first used. `register` serves one process. Names in entry points are known to
every process of an environment: to the command line, sweeps, workers and saved runs.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import threading
from collections.abc import Callable
from functools import cache, partial
from typing import Any, TypeVar, cast

from . import average, codec, memory, schedule, strategy, topology
from .algorithm import Algorithm, require
from .entry_points import declared, load, usable
from .messages import log
from .suggestion import suggestion

ENTRY_POINT_GROUP = "thinwire.algorithms"

METHODS = "asynchronous_diloco demo diloco dion mulo_co no_loco sparse_loco streaming_diloco".split()
"""Functions of `strategy` that the notation knows; each makes a strategy."""

_T = TypeVar("_T", bound=type[Algorithm])
_registered: dict[str, Callable[..., Any]] = {}
# Python up to 3.12.1 fails now and then where two threads build syntax trees at once (gh-106905).
_one_tree_at_a_time = threading.RLock()


def register(cls: _T) -> _T:
    """Make an algorithm known to `parse` under its class name; also usable as a decorator.

    Args:
        cls: a frozen dataclass derived from `Codec`, `Memory`, `Topology`, `Averager`, `Strategy` or another `Algorithm`.

    Returns:
        The class itself.

    Raises:
        ValueError: not such a class, or another algorithm has this name.

    Example:
        >>> from dataclasses import dataclass
        >>> import thinwire as tw
        >>> @tw.notation.register
        ... @dataclass(frozen=True, repr=False)
        ... class Halving(tw.schedule.Schedule):
        ...     start: float
        ...     unit = "epoch"
        ...     def at(self, progress):
        ...         return self.start / 2**progress.epoch
        >>> tw.parse("TopK(Halving(0.5))")
        TopK(Halving(start=0.5))
    """
    _checked_algorithm(cls, "register: ")
    name = cls.__name__
    known = _built_in().get(name, _registered.get(name, cls))
    # A module that is imported again defines its classes again.
    same = (known.__module__, known.__qualname__) == (cls.__module__, cls.__qualname__)
    require(same, f"register: {name} is the name of {known.__module__}.{known.__qualname__} already; choose another")
    _registered[name] = cls
    return cls


def vocabulary() -> dict[str, Callable[..., Any]]:
    """The names that `parse` understands, and the constructor of each; loads all entry points that can be used."""
    return usable(known_names(), _builder)


def known_names() -> set[str]:
    """The names that `parse` understands, without loading entry points."""
    return _built_in().keys() | _registered.keys() | declared(ENTRY_POINT_GROUP).keys()


def _builder(name: str) -> Callable[..., Any]:
    """What a known name calls. The library's own names come first, then registered ones, then entry points."""
    if name in _built_in():
        return _built_in()[name]
    if name not in _registered:
        _registered[name] = load(declared(ENTRY_POINT_GROUP)[name], partial(_named_algorithm, name))
    return _registered[name]


def _named_algorithm(name: str, value: Any) -> Any:
    cls = _checked_algorithm(value)
    require(cls.__name__ == name, f"its name must be that of the class, {cls.__name__}, as in the class's repr")
    return cls


@cache
def _built_in() -> dict[str, Callable[..., Any]]:
    packages = (average, codec, memory, schedule, strategy, topology)
    found = {name: getattr(package, name) for package in packages for name in dir(package)}
    functions: dict[str, Callable[..., Any]] = {"chain": codec.chain, "dgc": average.dgc, "sparse": average.sparse}
    functions |= {name: getattr(strategy, name) for name in METHODS}
    functions |= {name: value for name, value in found.items() if _is_algorithm(value)}
    for name in sorted(functions.keys() & declared(ENTRY_POINT_GROUP).keys()):
        value = declared(ENTRY_POINT_GROUP)[name].value
        log.warning(
            f"{value} of an installed package is not used, because {name} is a name of thinwire; give it another"
        )
    return functions


def _is_algorithm(value: Any) -> bool:
    is_data = inspect.isclass(value) and issubclass(value, Algorithm) and dataclasses.is_dataclass(value)
    return is_data and not inspect.isabstract(value)


def _checked_algorithm(value: Any, caller: str = "") -> Any:
    require(
        _is_algorithm(value) and value.__dataclass_params__.frozen,
        f"{caller}{value!r:.100} must be a frozen dataclass derived from Codec, Memory, Topology, Averager, Strategy or "
        "another Algorithm",
    )
    return value


def parse(text: str) -> Any:
    """Read an algorithm from its notation, which is its `repr`.

    Args:
        text: such as `"Mean(TopK(0.01), ErrorFeedback())"`.

    Returns:
        The algorithm.

    Raises:
        ValueError: one line that says what is wrong, at which column, and what was probably meant.

    Example:
        >>> import thinwire as tw
        >>> tw.parse("Mean(TopK(0.01), ErrorFeedback())") == tw.Mean(tw.TopK(0.01), tw.ErrorFeedback())
        True
    """
    require(isinstance(text, str), f"parse reads text, got {text!r}")
    text = text.strip()
    return _Reader(text, known_names()).read(_tree(text), depth=0)


def arguments(text: str) -> tuple[Callable[..., Any], dict[str, str]]:
    """What the outermost call of a valid notation calls, and the text of each argument by the name of its parameter.

    Raises:
        ValueError: the text cannot be read, or is no call.

    Example:
        >>> build, given = arguments("dgc(0.01, values='float16')")
        >>> build.__name__, given
        ('dgc', {'ratio': '0.01', 'values': "'float16'"})
    """
    require(isinstance(parse(text), Algorithm), f"{text!r} is no algorithm")
    node = cast(ast.Call, _tree(text.strip()))  # only calls give algorithms
    build = _builder(cast(ast.Name, node.func).id)
    named = {str(keyword.arg): ast.unparse(keyword.value) for keyword in node.keywords}
    bound = inspect.signature(build).bind_partial(*map(ast.unparse, node.args), **named)
    return build, bound.arguments


def _tree(text: str) -> ast.expr:
    try:
        with _one_tree_at_a_time:
            return ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"cannot read {_short(text)}: {error.msg} at column {error.offset}") from None
    except (RecursionError, MemoryError, ValueError) as error:  # from deep nesting or lone surrogates
        reason = str(error) if isinstance(error, ValueError) else "it is nested too deeply"
        raise ValueError(f"cannot read {_short(text)}: {reason} (from column 1 on)") from None


MAX_DEPTH = 50
"""How deeply calls and lists may be nested."""


class _Reader:
    def __init__(self, text: str, names: set[str]):
        self.text, self.names = text, names

    def read(self, node: ast.expr, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise self._error(node, f"nested more than {MAX_DEPTH} deep")
        match node:
            case ast.Call(func=ast.Name(id=name)):
                return self._call(node, name, depth)
            case ast.Constant(value=None | bool() | int() | float() | str() as value):
                return value
            case ast.Name(id="inf"):  # what `repr` makes of infinity
                return float("inf")
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
                return -value
            case ast.UnaryOp(op=ast.USub(), operand=ast.Name(id="inf")):
                return -float("inf")
            case ast.Tuple(elts=items):
                return tuple(self.read(item, depth + 1) for item in items)
            case ast.List(elts=items):
                return [self.read(item, depth + 1) for item in items]
            case ast.Dict(keys=keys, values=values):
                return self._dict(keys, values, depth)
            case ast.Name(id=name) if name in self.names:
                raise self._error(node, f"{name} needs parentheses: {name}()")
            case ast.Name(id=name):
                raise self._error(node, self._unknown(name))
        raise self._error(node, "only names of algorithms, their arguments and literals are understood here")

    def _dict(self, keys: list[ast.expr | None], values: list[ast.expr], depth: int) -> dict[str, Any]:
        read: dict[str, Any] = {}
        for key, value in zip(keys, values, strict=True):
            if key is None:
                raise self._error(value, "** is not understood here; write the entries out")
            if not (isinstance(key, ast.Constant) and isinstance(key.value, str)):
                raise self._error(key, "a key must be a text in quotes")
            if key.value in read:
                raise self._error(key, f"the key {key.value!r} is there twice")
            read[key.value] = self.read(value, depth + 1)
        return read

    def _call(self, node: ast.Call, name: str, depth: int) -> Any:
        if name not in self.names:
            raise self._error(node, self._unknown(name))
        try:
            build = _builder(name)
        except ValueError as error:
            raise self._error(node, str(error)) from error
        options = list(inspect.signature(build).parameters)
        keywords: dict[str, Any] = {}
        for keyword in node.keywords:
            if keyword.arg is None:
                raise self._error(node, "** is not understood here; write the options out")
            if keyword.arg not in options:
                raise self._error(keyword, f"{name} has no option {keyword.arg!r}{suggestion(keyword.arg, options)}")
            if keyword.arg in keywords:
                raise self._error(keyword, f"{name} is given the option {keyword.arg!r} twice")
            keywords[keyword.arg] = self.read(keyword.value, depth + 1)
        arguments = [self.read(a, depth + 1) for a in node.args]
        try:
            return build(*arguments, **keywords)
        except (TypeError, ValueError) as error:
            raise self._error(node, str(error).replace(f"{name}.__init__()", f"{name}()")) from None

    def _unknown(self, name: str) -> str:
        near = suggestion(name, self.names)
        return f"unknown name {name!r}{near}{'' if near.endswith('?') else '; see thinwire list'}"

    def _error(self, node: ast.expr | ast.keyword, message: str) -> ValueError:
        where = f" of {self.text!r}" if len(self.text) <= 60 else ""
        return ValueError(f"{message} (at column {node.col_offset + 1}{where})")


def _short(text: str) -> str:
    return repr(text) if len(text) <= 200 else f"{text[:60]!r}..."
