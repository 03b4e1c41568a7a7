"""With Triton no host waits for a codec of fixed size: not for scales, indices, checks, counts, or whether all is finite.
A whole step waits once, in `commit`, but where the sizes of messages depend on the data.

Every read of a tensor by the host is counted. Triton's interpreter reads tensors too, inside of launches; these reads are
not counted.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import fake_driver
from helpers.on_triton import DEVICE, gaussian
from torch.utils._python_dispatch import TorchDispatchMode

import thinwire as tw
from thinwire import kernels
from thinwire.codec import Key
from thinwire.kernels import flags

ROOT = Path(tw.__file__).parent
READS = {"_local_scalar_dense", "nonzero", "masked_select", "bincount", "_unique2", "equal"}


def place() -> str | None:
    """The innermost line of thinwire that runs; None in a launch."""
    frame = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.startswith(f"{ROOT}{os.sep}"):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.endswith("launch.py"):
        return None
    return f"{Path(frame.f_code.co_filename).relative_to(ROOT)}:{frame.f_lineno}"


class Reads(TorchDispatchMode):
    """Counts what the host reads, by line."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: Counter[str] = Counter()

    def note(self) -> None:
        if (line := place()) is not None:
            self.lines[line] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket._qualified_op_name.split("::")[1]
        indexed = args[1] if name in ("index", "index_put_") else []
        if name in READS or any(i is not None and i.dtype == torch.bool for i in indexed):
            self.note()
        return func(*args, **(kwargs or {}))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reads]:
    counter = Reads()
    monkeypatch.setattr(flags, "raises_at_once", lambda device: False)  # as on a GPU
    for name in ("tolist", "numpy"):
        original = getattr(torch.Tensor, name)

        def noted(self: torch.Tensor, *args: Any, _original: Callable[..., Any] = original, **kwargs: Any) -> Any:
            counter.note()
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, noted)
    yield counter
    monkeypatch.undo()
    if not fake_driver.ASKED_FOR:  # else what was decoded had not been written
        flags.check_faults(DEVICE)  # kernels found none


def encode_and_decode(codec: tw.codec.Codec) -> None:
    xs, keys = [gaussian(640), gaussian(300, seed=1)], [Key(0, i, 0) for i in range(2)]
    payload = codec.encode(xs, keys, [torch.empty_like(x) for x in xs])
    finite = codec.decode_sum([payload, payload], [torch.empty_like(x) for x in xs], 0.5, keys)
    assert isinstance(finite, torch.Tensor) and finite.device == DEVICE


FIXED_SIZE = [
    tw.TopK(0.1),
    tw.TopK(0.4),
    tw.codec.BlockwiseTopK(0.1, block=64),
    tw.codec.BlockwiseTopK(0.002, block=512),
    tw.codec.CoarseGrainedTopK(0.3, chunk=32),
    tw.RandomK(0.1),
    tw.RandomK(0.7, scaled=True),
    tw.RandomK(0.1, shared=True),
    tw.QSGD(bits=4),
    tw.QSGD(bits=2, bucket_size=10_000, norm="l2"),
    tw.NUQSGD(bits=3),
    tw.codec.OneBit(),
    tw.codec.SignNorm(),
    tw.TernGrad(),
    tw.Cast("float16"),
    tw.Cast("float8_e4m3fn"),
]


@pytest.mark.parametrize("codec", FIXED_SIZE, ids=repr)
def test_no_host_waits(codec, reads):
    codec.nbytes(1)  # what a codec makes of its own arguments, once
    reads.lines.clear()
    with kernels.use_backend("triton"), reads:
        encode_and_decode(codec)
    assert not reads.lines


@pytest.mark.parametrize("codec", [tw.Threshold(1.0), tw.TopK(0.1, sample=0.5), tw.TopK(0.1, indices="auto")], ids=repr)
def test_codecs_of_variable_size_wait(codec, reads):
    """The counter does see waits: the host needs the sizes of these payloads."""
    with kernels.use_backend("triton"), reads:
        encode_and_decode(codec)
    assert reads.lines


STEPS = {  # waits of a step of each averager outside of `commit`, by file: what docs/gpu.md lists
    "Mean(QSGD(bits=4), ErrorFeedback())": {},
    "Mean(QSGD(bits=4), exchange='scatter_reduce')": {},
    "Mean(TopK(0.1), MomentumCorrection(0.9))": {},
    "Mean(TopK(0.1), ErrorFeedback(), exchange='scatter_reduce')": {},
    "Mean(RandomK(0.1, shared=True))": {},
    "PowerSGD(rank=2)": {},
    "Mean(TopK(0.1), ErrorFeedback(), exchange='sparse_reduce')": {
        "average/mean/exchange/regions.py": 3,
        "average/mean/exchange/sparse_reduce.py": 2,
    },
    "Mean(TopK(0.1, sample=0.5), ErrorFeedback())": {
        "codec/sparse/payload.py": 1,
        "codec/sparse/top_k.py": 1,
        "kernels/triton/select.py": 2,  # one of them in main memory
    },
}


@pytest.mark.parametrize("text", STEPS)
def test_waits_of_a_step(text, reads):
    """In the thread of worker 0, with a matrix and a vector; `commit` reads one flag."""

    def worker(comm: tw.comm.Communicator) -> tuple[Counter[str], int]:
        averager = tw.parse(text)
        tensors = [("a", gaussian(640, seed=comm.rank).view(32, 20)), ("b", gaussian(300, seed=comm.rank))]
        state = averager.init(tensors, comm)
        counter = Reads()
        for _ in range(2):  # the first makes what is kept
            counter.lines.clear()
            reads.lines.clear()
            with counter:
                averager.step(state, tensors, comm).wait()
            found = counter.lines + (reads.lines if comm.rank == 0 else Counter())
            counter.lines.clear()
            with counter:
                averager.commit(state)
        return found, counter.lines.total()

    with kernels.use_backend("triton"):
        (found, _), *_ = tw.LocalWorld(1).run(worker)
    by_file: Counter[str] = Counter()
    for line, count in found.items():
        by_file[line.partition(":")[0]] += count
    assert dict(by_file) == STEPS[text], found
