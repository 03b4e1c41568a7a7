"""Debug mode (`THINWIRE_DEBUG=1`): unwritten buffers show as NaN, and writes into tensors that are being sent raise."""

from __future__ import annotations

import ast
import runpy
import warnings
from pathlib import Path

import pytest
import torch

import thinwire as tw
from thinwire import debug, kernels
from thinwire.codec import Key
from thinwire.comm import LocalWorld

KEY = Key(seed=0, stream=0, step=0)


@pytest.fixture
def in_debug_mode(monkeypatch):
    monkeypatch.setattr(debug, "enabled", True)
    monkeypatch.setattr(debug, "empty", debug.filling(torch.empty))
    monkeypatch.setattr(debug, "empty_like", debug.filling(torch.empty_like))


def write_early(name):
    """A worker's function: it starts operation `name`, and rank 1 writes into what it sends before `wait()`."""

    def work(comm):
        tensor, other = torch.ones(5), 1 - comm.rank
        handle = {
            "all_gather": lambda: comm.all_gather(tensor),
            "all_gather of variable size": lambda: comm.all_gather(tensor, variable=True),
            "all_to_all": lambda: comm.all_to_all([tensor, tensor]),
            "exchange": lambda: comm.exchange({other: tensor}, {other: torch.zeros(5)}),
            "broadcast": lambda: comm.broadcast(tensor, root=1),
        }[name]()
        if comm.rank == 1:
            tensor[2] = 7
        try:
            handle.wait()
        except ValueError as error:
            return str(error)
        return None

    return work


@pytest.mark.parametrize("name", ["all_gather", "all_gather of variable size", "all_to_all", "exchange", "broadcast"])
def test_a_write_into_a_sent_tensor_is_an_error(in_debug_mode, name):
    first, second = LocalWorld(2).run(write_early(name))
    assert first is None
    assert second.startswith(
        f"rank 1: somebody wrote into a tensor while {name.split()[0]} owned it: sent tensor 0 of 20 bytes"
    )


def test_writes_go_unchecked_without_debug_mode(monkeypatch):
    monkeypatch.setattr(debug, "enabled", False)
    assert LocalWorld(2).run(write_early("all_gather")) == [None, None]


def test_in_place_operations_may_change_their_tensors(in_debug_mode):
    def work(comm):
        return comm.all_reduce(torch.ones(2)).wait().tolist(), comm.broadcast(torch.full((1,), comm.rank)).wait().item()

    assert LocalWorld(2).run(work) == [([2.0, 2.0], 0)] * 2


def test_a_codec_that_forgets_to_write_its_payload_shows(in_debug_mode, monkeypatch):
    codec, x = tw.Cast("bfloat16"), torch.ones(6)
    with monkeypatch.context() as broken:
        broken.setattr(kernels.cast, "encode", lambda *arguments, **named: None)
        payload = codec.encode(x, KEY)
    assert payload.tolist() == [255] * 12
    assert codec.decode(payload, 6).isnan().all()
    assert codec.decode(codec.encode(x, KEY), 6).equal(x)


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("0", False), ("", False), (None, False)])
def test_the_environment_turns_it_on(monkeypatch, value, expected):
    monkeypatch.delenv("THINWIRE_DEBUG", raising=False)
    if value is not None:
        monkeypatch.setenv("THINWIRE_DEBUG", value)
    assert runpy.run_path(debug.__file__)["enabled"] is expected


def test_every_dtype_has_its_filling(in_debug_mode):
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64):
        assert debug.empty(3, dtype=dtype).isnan().all()
    for dtype in (torch.uint8, torch.int32, torch.int64):
        assert debug.empty_like(torch.zeros(3, dtype=dtype)).view(torch.uint8).eq(255).all()


def test_codecs_averagers_and_references_allocate_in_debug_mode():
    """What they allocate without writing it starts as NaN: they call `debug.empty`, and PyTorch's own for no element alone."""
    library = Path(tw.__file__).parent
    calls = [
        (f"{path.relative_to(library)}:{node.lineno}", ast.unparse(node.args[0]))
        for room in ("average", "codec", "memory", "kernels")
        for path in sorted((library / room).rglob("*.py"))
        if path.parent.name != "triton"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.empty", "torch.empty_like")
    ]
    assert [place for place, size in calls if not size.strip("(").startswith("0")] == []


def test_models_that_drift_apart_under_gradients_are_named(in_debug_mode):
    """One worker steps on one layer alone: in the next round the first one warns, once."""

    def work(comm, caught):
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        numbers = []
        with tw.attach(model, optimizer, tw.Gradients(tw.Mean()), comm=comm):
            for step in range(4):
                if step == 1 and comm.rank == 1:
                    optimizer.param_groups[0]["params"] = [*model[0].parameters()]
                model(torch.ones(3)).backward()
                numbers.append(len(caught))
                optimizer.step()
                optimizer.zero_grad()
        return numbers

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        numbers, _ = LocalWorld(2).run(work, caught)
    assert numbers == [0, 0, 1, 1]
    assert [str(warning.message) for warning in caught] == [
        "Gradients: the workers' models are not equal, although all get the same gradients: '1.weight' and 1 more; freeze, "
        "load and change parameters alike on all workers"
    ]
