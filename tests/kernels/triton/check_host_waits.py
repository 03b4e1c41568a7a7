"""With Triton no host waits for a codec of fixed size: not for scales, indices, checks, counts, or whether all is finite.
Whole steps wait as `STEPS` says.

Every read of a tensor by the host is counted. Triton's interpreter reads tensors too, inside of launches; these reads are
not counted.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import fake_driver
from helpers.on_triton import DEVICE, gaussian
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import thinwire as tw
from thinwire import kernels
from thinwire.codec import Key
from thinwire.kernels import flags

ROOT = Path(tw.__file__).parent
OPERATIONS = {"nonzero", "masked_select", "bincount", "_unique2", "equal", "_local_scalar_dense"}
FUNCTIONS = ("nonzero", "bincount", "equal", "masked_select", "unique")
METHODS = ("tolist", "numpy", "item", "__bool__", "__int__", "__float__", "__index__", "cpu", *FUNCTIONS)
INDEXING, UPLOADS = ("__getitem__", "__setitem__"), ("tensor", "as_tensor")


def place() -> str | None:
    """The innermost line of thinwire that runs, but for those that read flags for others; None in a launch."""
    frame = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.startswith(f"{ROOT}{os.sep}"):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.endswith("launch.py"):
        return None
    while frame.f_code.co_filename.endswith("flags.py"):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).relative_to(ROOT)}:{frame.f_lineno}"


class Reads(TorchDispatchMode):
    """Counts what the host reads, by line: by methods of tensors in all threads, by operations in that of the context."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: Counter[str] = Counter()
        self.is_active = False
        self.inside = threading.local()

    def note(self) -> None:
        if not getattr(self.inside, "reads", False) and (line := place()) is not None:
            self.lines[line] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket._qualified_op_name.split("::")[1]
        indexed = args[1] if name in ("index", "index_put_") else []
        if name in OPERATIONS or any(i is not None and i.dtype == torch.bool for i in indexed):
            self.note()
        return func(*args, **(kwargs or {}))

    def noted(
        self, method: Callable[..., Any], waits: Callable[..., bool] = lambda *_, **__: True
    ) -> Callable[..., Any]:
        """The method, which counts while the counter is active; what it calls itself is no other read.

        Args:
            method: of a tensor, or a function.
            waits: of its arguments, whether a host waits.
        """

        def counting(*args: Any, **kwargs: Any) -> Any:
            if self.is_active and waits(*args, **kwargs):
                self.note()
            before, self.inside.reads = getattr(self.inside, "reads", False), True
            try:
                return method(*args, **kwargs)
            finally:
                self.inside.reads = before

        return counting

    def by_file(self, times: int = 1) -> dict[str, int]:
        """Reads by file; of one time of several, rounded up."""
        files: Counter[str] = Counter()
        for line, count in self.lines.items():
            files[line.partition(":")[0]] += count
        return {file: -(-count // times) for file, count in sorted(files.items())}


def has_mask(_tensor: torch.Tensor, index: Any, *_value: Any) -> bool:
    """Whether an index is a mask, whose ones the host counts."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, torch.Tensor) and part.dtype == torch.bool for part in parts)


def is_upload(data: Any, *_rest: Any, device: Any = None, **_others: Any) -> bool:
    """Whether numbers are copied to a GPU, which the host waits for."""
    return not isinstance(data, torch.Tensor) and device is not None and torch.device(device).type == "cuda"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reads]:
    counter = Reads()
    for name in METHODS:
        monkeypatch.setattr(torch.Tensor, name, counter.noted(getattr(torch.Tensor, name)))
    for name in INDEXING:
        monkeypatch.setattr(torch.Tensor, name, counter.noted(getattr(torch.Tensor, name), has_mask))
    for name in FUNCTIONS:
        monkeypatch.setattr(torch, name, counter.noted(getattr(torch, name)))
    for name in UPLOADS:
        monkeypatch.setattr(torch, name, counter.noted(getattr(torch, name), is_upload))
    yield counter
    monkeypatch.undo()
    if not fake_driver.is_installed:  # else what was decoded had not been written
        flags.check_faults(DEVICE)  # kernels found none


def encode_and_decode(codec: tw.codec.Codec) -> None:
    xs, keys = [gaussian(640), gaussian(300, seed=1)], [Key(0, i, 0) for i in range(2)]
    payload = codec.encode(xs, keys, [torch.empty_like(x) for x in xs])
    finite = codec.decode_sum([payload, payload], [torch.empty_like(x) for x in xs], 0.5, keys)
    assert isinstance(finite, flags.Unread) and {flag.device for flag in finite} == {DEVICE}


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
    tw.codec.Float4(),
    tw.codec.Dynamic8(),
    tw.codec.BinMeans(),
    tw.codec.NaturalCompression(),
    tw.chain(tw.codec.DCT(16), tw.codec.BlockwiseTopK(0.1, block=64)),
]


@pytest.mark.parametrize("codec", FIXED_SIZE, ids=repr)
def test_no_host_waits(codec, reads):
    with kernels.use_backend("triton"):
        encode_and_decode(codec)  # the first call makes what is kept
    reads.is_active = True
    with kernels.use_backend("triton"), reads:
        encode_and_decode(codec)
    assert not reads.lines


@pytest.mark.parametrize("codec", [tw.Threshold(1.0), tw.TopK(0.1, sample=0.5), tw.TopK(0.1, indices="auto")], ids=repr)
def test_codecs_of_variable_size_wait(codec, reads):
    """The counter does see waits: the host needs the sizes of these payloads."""
    reads.is_active = True
    with kernels.use_backend("triton"), reads:
        encode_and_decode(codec)
    assert reads.lines


COMMIT = {"average/mean/mean.py": 1}
GOSSIP = {"average/gossip/base.py": 1, "strategy/model/own_gradients.py": 1}  # in `commit`, and of the step's gradients
LOCAL = {"strategy/model/own_gradients.py": 1}
STEPS = {  # waits of a step of a worker, by file: what docs/gpu.md lists. A round of several steps counts for each
    "Gradients(Mean(QSGD(bits=4), ErrorFeedback()))": COMMIT,
    "Gradients(Mean(QSGD(bits=4), exchange='scatter_reduce'))": COMMIT,
    "Gradients(Mean(QSGD(bits=4)), on_nonfinite='raise')": COMMIT,
    "Gradients(Mean(TopK(0.1), MomentumCorrection(0.9)))": COMMIT,
    "Gradients(Mean(TopK(0.1), ErrorFeedback(), exchange='scatter_reduce'))": COMMIT,
    "Gradients(Mean(RandomK(0.1, shared=True)))": COMMIT,
    "Gradients(Mean(QSGD(bits=4), ErrorFeedback(), exchange='hierarchical', workers_per_node=2))": COMMIT,
    "Gradients(Mean(TopK(0.1), EF21()))": COMMIT,
    "Gradients(Mean(QSGD(bits=4), LoCo()))": COMMIT,
    "Gradients(Mean(LowRank(2, QSGD(bits=6)), ErrorFeedback()))": COMMIT,
    "Gradients(Mean(Fitted(3.0), ErrorFeedback()))": COMMIT,  # in rounds that do not measure
    "Gradients(Mean(QSGD(bits=4), clip=ClipByNorm(1.0)))": COMMIT,
    "Gradients(Mean(QSGD(bits=4), clip=ClipValueByGlobalNorm()))": COMMIT | {"average/mean/clip.py": 2},
    "Gradients(Mean(QSGD(bits=4), rule=Median()))": COMMIT
    | {"average/robust/base.py": 1, "average/robust/record.py": 1},
    "Gradients(Mean(QSGD(bits=4), rule=CenteredClipping(1.0)))": COMMIT
    | {"average/robust/centered_clipping.py": 3, "average/robust/record.py": 3},
    "Gradients(PowerSGD(rank=2))": {"average/low_rank/power_sgd.py": 1},
    "Gradients(Dion(rank=2))": {"average/low_rank/dion.py": 1},
    "Gradients(Mean(TopK(0.1), MomentumCorrection(0.9), exchange='sparse_reduce'))": COMMIT
    | {
        "average/mean/exchange/regions.py": 1,  # a bucket
        "average/mean/exchange/sparse_reduce.py": 1,  # a bucket: what arrived in main memory
    },
    "Gradients(Mean(TopK(0.1, sample=0.5), ErrorFeedback()))": COMMIT
    | {
        "codec/sparse/base.py": 1,  # an upload
        "codec/sparse/payload.py": 2,  # of each payload
        "codec/sparse/top_k.py": 1,
        "kernels/triton/select.py": 2,  # one of them in main memory
    },
    "Gossip(Mix(Complete()))": GOSSIP,
    "Gossip(Mix(Complete()), overlap=True)": GOSSIP,
    "Gossip(PushSum(Complete()))": GOSSIP | {"average/gossip/nodes.py": 2},
    "Gossip(Choco(Complete(), TopK(0.1)))": {
        "average/gossip/choco.py": 2,
        "average/gossip/fitted_step.py": 3,
        "strategy/model/own_gradients.py": 1,
    },
    "Gossip(DeepSqueeze(Complete(), QSGD(bits=4)))": GOSSIP
    | {"average/gossip/deepsqueeze.py": 2, "average/gossip/fitted_step.py": 3},
    "Gossip(Moniqua(Complete()))": {"average/gossip/moniqua_step.py": 3, "strategy/model/own_gradients.py": 1},
    "Gossip(PowerGossip(Complete(), rank=1))": GOSSIP,
    "Gossip(ClippedGossip(Complete(), tau=1.0))": GOSSIP | {"average/gossip/clipped_gossip.py": 1},
    "Local(Mean(QSGD(bits=4), ErrorFeedback()), every=2)": COMMIT | LOCAL,
    "Local(Mean(QSGD(bits=4), ErrorFeedback()), every=2, delay=1)": COMMIT | LOCAL,
    "Local(Mean(TopK(0.1), ErrorFeedback()), every=2, outer=OuterSGD(0.7, 0.9))": COMMIT | LOCAL,
    "Local(Mean(QSGD(bits=4)), every=2, weights=InverseNorm())": COMMIT
    | LOCAL
    | {"strategy/local/inverse_norm.py": 1},  # two a round
}


def waits(
    comm: tw.comm.Communicator, together: threading.Barrier, strategy: tw.Strategy, reads: Reads, num_steps: int
) -> None:
    """Train, and count what both workers read after the first steps, which make what is kept."""
    torch.manual_seed(0)
    model = nn.Linear(20, 30).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train() -> None:
        for _ in range(num_steps):
            optimizer.zero_grad()
            model(torch.ones(2, 20, device=DEVICE) * (1 + comm.rank)).sum().backward()
            optimizer.step()

    with tw.attach(model, optimizer, strategy, comm=comm):
        train()
        for active in (True, False):
            together.wait()
            reads.is_active = active
            together.wait()
            train() if active else None
        together.wait()


@pytest.mark.parametrize("text", STEPS)
def test_waits_of_a_step(text, reads):
    """Of two workers, in all of their threads."""
    strategy = tw.parse(text)  # a rule encodes a few numbers in main memory, where Triton does not run
    with kernels.use_backend("triton"):
        tw.LocalWorld(2).run(waits, threading.Barrier(2, timeout=300), strategy, reads, 2)
    assert reads.by_file(2 * 2) == STEPS[text], reads.lines


def test_waits_of_an_elastic_step(reads):
    """Votes are read in main memory, once a round. Comparing, which hashes the whole state, is off."""
    lighthouse, together = tw.comm.Lighthouse(2, "127.0.0.1"), threading.Barrier(2, timeout=300)
    strategy = tw.parse("Local(Mean(QSGD(bits=4), ErrorFeedback()), every=2)")

    def worker(world: tw.comm.Communicator) -> None:
        with tw.comm.ElasticCommunicator(lighthouse.address, world.rank, quorum_seconds=60, check_every=0) as comm:
            waits(comm, together, strategy, reads, 2)

    with kernels.use_backend("triton"):
        tw.LocalWorld(2).run(worker)
    assert reads.by_file(2 * 2) == COMMIT | LOCAL | {
        "comm/elastic/communicator.py": 2,  # three a round
        "membership.py": 1,  # the norm of what died with a worker
    }, reads.lines
