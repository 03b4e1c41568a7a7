"""On a GPU no host waits: codecs of fixed size run on fake tensors, which have no values that a host could read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.codecs import CODECS
from helpers.spawn import retire, spawn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import thinwire as tw
from thinwire import kernels
from thinwire.codec import Key
from thinwire.kernels import flags

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")

# Where the host does wait, and why. Codecs whose size depends on the data wait for the size.
EXCEPTIONS = {
    tw.RandomK: "cycle walking ends when every index is inside",
    tw.codec.Quantize: "uploads its table of levels",
    tw.NUQSGD: "uploads its table of levels",
    tw.ALQ: "uploads its table of levels",
    tw.AMQ: "uploads its table of levels",
    tw.codec.SVD: "the solver waits",
    tw.codec.Float4: "uploads its table of levels",
    tw.codec.Dynamic8: "uploads its table of levels",
}


def waits(codec: tw.codec.Codec) -> bool:
    return not codec.traits.fixed_size or type(codec) in EXCEPTIONS or any(map(waits, codec.parts()))


def exception(kind: type[tw.codec.Codec]) -> tw.codec.Codec:
    """The first codec of a kind in `EXCEPTIONS`."""
    return next(codec for codec in CODECS if type(codec) is kind)


WAITLESS = [codec for codec in CODECS if not waits(codec)]
TESTED = WAITLESS + [exception(kind) for kind in EXCEPTIONS]  # fake tensors are slow: the others are not run


@contextmanager
def counted_uploads() -> Iterator[Counter[str]]:
    """Counts tensors that are made of Python numbers on a device: each is a copy that a host waits for."""
    counter: Counter[str] = Counter()

    def counting(name: str) -> Any:
        original = getattr(torch, name)

        def counted(data: Any, *args: Any, **kwargs: Any) -> Any:
            device = torch.device(kwargs.get("device") or "cpu")
            counter[f"torch.{name}"] += device.type != "cpu" and not isinstance(data, torch.Tensor)
            return original(data, *args, **kwargs)

        return mock.patch.object(torch, name, counted)

    with counting("tensor"), counting("as_tensor"):
        yield counter


def run(codec: tw.codec.Codec) -> None:
    keys = [Key(0, i, 0) for i in range(2)]
    with FakeTensorMode():
        flags._COUNTERS.clear()
        xs = [torch.empty(128, 64, device="fakegpu"), torch.empty(50, 100, device="fakegpu")]
        payload = codec.encode(xs, keys, [torch.empty_like(x) for x in xs])
        finite = codec.decode_sum([payload, payload], [torch.empty_like(x) for x in xs], 0.5, keys)
        assert isinstance(finite, flags.Unread) and {flag.device.type for flag in finite} == {"fakegpu"}


def reasons_to_wait(comm: tw.Communicator) -> list[str]:
    """For each of `TESTED` why a host waits; empty if none does.

    A CPU build of PyTorch refuses to index fake CUDA tensors. A device without kernels of its own takes their place. It
    cannot be taken back, so this process ends afterwards.
    """
    retire()
    _setup_privateuseone_for_python_backend("fakegpu")
    reasons = []
    for codec in TESTED:
        with counted_uploads() as uploads:
            try:
                run(codec)
            except (DataDependentOutputException, DynamicOutputShapeException, NotImplementedError) as error:
                uploads[str(error)] += 1
        reasons.append(", ".join(+uploads))
    return reasons


@pytest.fixture(scope="module")
def reasons() -> list[str]:
    (found,) = spawn(1, reasons_to_wait)
    return found


@pytest.mark.parametrize("codec", WAITLESS, ids=repr)
def test_codecs_of_fixed_size(codec, reasons):
    assert reasons[TESTED.index(codec)] == ""


@pytest.mark.parametrize("kind", EXCEPTIONS)
def test_exceptions_are_still_exceptions(kind, reasons):
    """Take a codec off the list once it no longer waits."""
    assert reasons[TESTED.index(exception(kind))]


def test_corrupt_indices_are_reported_once_a_round(monkeypatch):
    """Off the CPU, kernels count faults, stay inside their buffers, and `read` raises them."""
    counters = torch.zeros(len(flags.Fault), dtype=torch.int32)
    monkeypatch.setattr(flags, "fault_counters", lambda device: counters)
    monkeypatch.setattr(flags, "in_main_memory", lambda device: False)
    codec, out = tw.TopK(0.1), torch.zeros(100)
    with kernels.use_backend("reference"):
        payload = codec.encode(torch.arange(100.0))
        flags.check_faults(payload.device)  # none yet
        payload[-7:] = 255  # all of the indices
        finite = codec.decode_sum([payload], out)
    assert isinstance(finite, flags.Unread)
    with pytest.raises(ValueError, match="payload: its indices are corrupt"):
        flags.read(finite)
    assert flags.read(finite)  # a fault is reported once


def device_of_counters(comm: tw.Communicator) -> bool:
    """Whether faults are looked up where kernels count them, also for a device without an index."""
    retire()
    _setup_privateuseone_for_python_backend("fakegpu")
    asked = []
    with mock.patch.object(flags, "fault_counters", lambda device: asked.append(device) or torch.zeros(1)):
        with FakeTensorMode():
            counted_on = torch.empty(2, device="fakegpu").device
            try:
                flags.check_faults(torch.device("fakegpu"))
            except DataDependentOutputException:
                pass  # fake counters have no values
    return asked == [counted_on]


def test_a_device_without_an_index_is_the_current_one():
    assert spawn(1, device_of_counters) == [True]


def test_indices_outside_are_reported_and_nothing_is_written_there(monkeypatch):
    counters = torch.zeros(len(flags.Fault), dtype=torch.int32)
    monkeypatch.setattr(flags, "fault_counters", lambda device: counters)
    monkeypatch.setattr(flags, "in_main_memory", lambda device: False)
    whole = torch.zeros(30)
    with kernels.use_backend("reference"):
        kernels.scatter.add([whole[10:20]], torch.tensor([3, 90], dtype=torch.int32), torch.ones(2), [2], 1.0)
    assert not whole[:10].any() and not whole[20:].any()
    with pytest.raises(ValueError, match="outside of its segment"):
        flags.check_faults(whole.device)
