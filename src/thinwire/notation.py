"""One notation for Python, the command line, saved runs and sweeps: `parse(repr(x)) == x`.

The text is read by a walk over its syntax tree. Calls of public names, literals, and lists and tuples of them are
understood; anything else is an error that points at the column. Nothing is ever evaluated.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from . import average, codec, memory, schedule, topology
from .algorithm import Algorithm


def vocabulary() -> dict[str, Callable]:
    """The names that `parse` understands: all public algorithms, and the functions that build them."""
    rooms = {name: getattr(room, name) for room in (average, codec, memory, schedule, topology) for name in dir(room)}
    return {"chain": codec.chain, "dgc": average.dgc} | {
        name: value
        for name, value in rooms.items()
        if inspect.isclass(value) and issubclass(value, Algorithm) and dataclasses.is_dataclass(value)
    }


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
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError as error:
        raise ValueError(f"cannot read {text!r}: {error.msg} at column {error.offset}") from None
    return _Reader(text.strip(), vocabulary()).read(tree.body)


class _Reader:
    def __init__(self, text: str, names: Mapping[str, Callable]):
        self.text, self.names = text, names

    def read(self, node: ast.expr) -> Any:
        match node:
            case ast.Call(func=ast.Name(id=name)):
                return self._call(node, name)
            case ast.Constant(value=None | bool() | int() | float() | str() as value):
                return value
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
                return -value
            case ast.Tuple(elts=items):
                return tuple(self.read(item) for item in items)
            case ast.List(elts=items):
                return [self.read(item) for item in items]
            case ast.Name(id=name) if name in self.names:
                raise self._error(node, f"{name} needs parentheses: {name}()")
            case ast.Name(id=name):
                raise self._error(node, f"unknown name {name!r}{suggestion(name, self.names)}")
        raise self._error(node, "only names of algorithms, their arguments and literals are understood here")

    def _call(self, node: ast.Call, name: str) -> Any:
        if name not in self.names:
            raise self._error(node, f"unknown name {name!r}{suggestion(name, self.names)}")
        build = self.names[name]
        options = list(inspect.signature(build).parameters)
        keywords = {}
        for keyword in node.keywords:
            if keyword.arg is None:
                raise self._error(node, "** is not understood here; write the options out")
            if keyword.arg not in options:
                raise self._error(keyword, f"{name} has no option {keyword.arg!r}{suggestion(keyword.arg, options)}")
            keywords[keyword.arg] = self.read(keyword.value)
        arguments = [self.read(a) for a in node.args]
        try:
            return build(*arguments, **keywords)
        except (TypeError, ValueError) as error:
            raise self._error(node, str(error).replace(f"{name}.__init__()", f"{name}()")) from None

    def _error(self, node: ast.AST, message: str) -> ValueError:
        if len(self.text) > 60:
            return ValueError(f"{message} (at column {node.col_offset + 1})")
        return ValueError(f"{message} (at column {node.col_offset + 1} of {self.text!r})")


def suggestion(name: str, known: Iterable[str]) -> str:
    """What was probably meant by a misspelt name, or else all that is known; to be put behind a message.

    Example:
        >>> suggestion("TopKK", ["TopK", "QSGD"])
        "; did you mean 'TopK'?"
    """
    close = difflib.get_close_matches(name.lower(), [k.lower() for k in known], n=1, cutoff=0.5)
    if not close:
        return f"; known are {', '.join(sorted(known))}"
    meant = next(k for k in known if k.lower() == close[0])
    return f"; did you mean {meant!r}?"
