"""How a backend is chosen, what it declares, and what serves where the C++ extension is missing."""

from __future__ import annotations

import inspect
import sys
import warnings

import pytest
import torch
from helpers.program import programs

from thinwire import kernels
from thinwire.kernels import backend


def without_the_extension():
    for name in [name for name in sys.modules if name.partition(".")[0] == "thinwire"]:
        del sys.modules[name]  # it was imported with the extension
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


@pytest.mark.parametrize("name", sorted(backend.functions_for("cpu")))
def test_a_backend_declares_kernels_with_the_parameters_of_their_reference(name):
    ours, truth = backend.functions_for("cpu")[name], backend._REFERENCES[name]
    assert list(inspect.signature(ours).parameters) == list(inspect.signature(truth).parameters)


def test_a_kernel_that_a_backend_does_not_declare_falls_back_to_the_reference(monkeypatch):
    xs = [torch.randn(1000, generator=torch.Generator().manual_seed(0))]
    expected = kernels.select.topk(xs, [10])
    without = {name: f for name, f in backend.functions_for("cpu").items() if name != "select.topk"}
    monkeypatch.setattr(backend, "_forced", without)
    assert all(map(torch.equal, kernels.select.topk(xs, [10]), expected))


def test_the_reference_serves_without_the_extension_and_says_so_once(tmp_path):
    with programs(without_the_extension, [()], tmp_path) as (program,):
        assert program.wait() == 0, program.stderr
