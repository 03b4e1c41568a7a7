"""The library makes no tensor on PyTorch's default device, which a user may have set to a GPU."""

from __future__ import annotations

import ast
from pathlib import Path

import thinwire

LIBRARY = Path(thinwire.__file__).parent
LEFT_OUT = ("lab/",)
MAKERS = {"arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm",
          "tensor", "zeros"}  # fmt: skip


def is_on_the_default_device(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MAKERS):
        return False
    module = node.func.value
    return isinstance(module, ast.Name) and module.id in ("torch", "debug") and "device" not in {
        keyword.arg for keyword in node.keywords
    }  # fmt: skip


def test_every_tensor_is_made_on_a_named_device():
    found = [
        f"{path.relative_to(LIBRARY)}:{node.lineno}"
        for path in sorted(LIBRARY.rglob("*.py"))
        if not str(path.relative_to(LIBRARY)).startswith(LEFT_OUT)
        for node in ast.walk(ast.parse(path.read_text()))
        if is_on_the_default_device(node)
    ]
    assert found == []
