"""How a backend is chosen, what it has, and what serves where the C++ extension is missing."""

from __future__ import annotations

import ast
import inspect
import sys
import warnings
from pathlib import Path

import pytest
import torch
from helpers.program import programs

import thinwire as tw
from thinwire import kernels
from thinwire.kernels import _native, backend, cpu


def without_the_extension():
    ours = [name for name in sys.modules if name.partition(".")[0] == "thinwire"]
    for name in ours:
        if not name.endswith("._engine"):  # an extension is loaded once in a process
            del sys.modules[name]  # it was imported with the kernels' extension
    sys.modules["thinwire.kernels._native"] = None
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        import thinwire as tw

        for codec in (tw.QSGD(bits=4), tw.TopK(0.1)):
            codec.decode(codec.encode(torch.ones(100)), 100)
    messages = [str(w.message) for w in seen if issubclass(w.category, RuntimeWarning)]
    assert len(messages) == 1 and "C++17 compiler" in messages[0] and "pip install" in messages[0], messages
    with pytest.raises(ImportError), tw.kernels.use_backend("cpu"):
        pass


def parameters(function):
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize("kernel", [k for k in backend.KERNELS if "cpu" in k.functions], ids=lambda k: k.name)
def test_a_function_of_the_backend_has_the_parameters_of_its_reference(kernel):
    if kernel not in cpu.SAME_ARGUMENTS:
        assert parameters(kernel.functions["cpu"]) == parameters(kernel.reference)
        return
    stub = ast.parse(Path(_native.__file__).with_name("_native.pyi").read_text())  # made with the extension
    named = {node.name: node.args.args for node in stub.body if isinstance(node, ast.FunctionDef)}
    # The names differ in places.
    assert len(named[cpu.SAME_ARGUMENTS[kernel].__name__]) == len(parameters(kernel.reference))


def test_triton_refuses_tensors_in_main_memory():
    pytest.importorskip("triton")
    with (
        kernels.use_backend("triton"),
        pytest.raises(ValueError, match="need tensors on a GPU, got tensors on the CPU"),
    ):
        tw.TopK(0.5).encode(torch.ones(4))
    with (
        kernels.use_backend("triton"),
        pytest.raises(ValueError, match="need tensors on a GPU, got tensors on the CPU"),
    ):
        tw.QSGD(bits=4).encode(torch.ones(4))


def test_a_kernel_that_a_backend_does_not_have_falls_back_to_the_reference(monkeypatch):
    xs = [torch.randn(1000, generator=torch.Generator().manual_seed(0))]
    kernel = kernels.select._topk
    assert kernel.on["cpu"] is not kernel.reference
    expected = kernels.select.topk(xs, [10])
    monkeypatch.delitem(kernel.functions, "cpu")
    monkeypatch.setattr(kernel, "on", type(kernel.on)(kernel))  # nothing is chosen yet
    assert kernel.on["cpu"] is kernel.reference
    assert all(map(torch.equal, kernels.select.topk(xs, [10]), expected))


def test_the_reference_serves_without_the_extension_and_says_so_once(tmp_path):
    with programs(without_the_extension, [()], tmp_path) as (program,):
        assert program.wait() == 0, program.stderr
