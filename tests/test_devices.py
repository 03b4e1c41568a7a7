"""The library makes no tensor on PyTorch's default device or of its default dtype, which a user may have set."""

from __future__ import annotations

import ast
from pathlib import Path

import thinwire

LIBRARY = Path(thinwire.__file__).parent
LEFT_OUT = ("lab/",)
MAKERS = {"arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm",
          "tensor", "zeros"}  # fmt: skip
OF_DEFAULT_DTYPE = {"empty", "eye", "linspace", "ones", "rand", "randn", "zeros"}  # whatever they are given


def made_without(keyword: str, makers: set[str], left_out: tuple[str, ...]) -> list[str]:
    """Where the library makes a tensor and does not name its device or dtype."""
    return [
        f"{path.relative_to(LIBRARY)}:{node.lineno}"
        for path in sorted(LIBRARY.rglob("*.py"))
        if not str(path.relative_to(LIBRARY)).startswith(left_out)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in makers
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in ("torch", "debug")
        and keyword not in {named.arg for named in node.keywords}
    ]


def test_every_tensor_is_made_on_a_named_device():
    assert made_without("device", MAKERS, LEFT_OUT) == []


def test_every_tensor_is_made_of_a_named_dtype():
    assert made_without("dtype", OF_DEFAULT_DTYPE, (*LEFT_OUT, "testing/")) == []
