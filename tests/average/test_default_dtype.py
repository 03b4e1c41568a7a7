"""Averagers give the same bits whatever `torch.set_default_dtype` says, as in a script whose models are float64 or bfloat16."""

from __future__ import annotations

import pytest
import torch
from helpers.averagers import GOSSIP
from helpers.codecs import CODECS

import thinwire as tw
from thinwire import kernels

TOP, UNBIASED, SPARSE = tw.TopK(0.2), tw.RandomK(0.2, scaled=True), tw.chain(tw.TopK(0.2), tw.QSGD(bits=4))
MEMORIES = (tw.memory.EF21(), tw.MomentumCorrection(), tw.memory.SignDescent())
RULES = (tw.average.GeometricMedian(), tw.average.CenteredClipping(), tw.average.Median(), tw.average.TrimmedMean())
AVERAGERS = [
    *GOSSIP,
    *(tw.Mean(codec, tw.ErrorFeedback()) for codec in CODECS),
    *(tw.Mean(SPARSE, tw.ErrorFeedback(), exchange=exchange) for exchange in ("scatter_reduce", "sparse_reduce")),
    tw.Mean(SPARSE, tw.ErrorFeedback(), exchange="hierarchical", workers_per_node=2),
    tw.Mean(SPARSE, tw.ErrorFeedback(), exchange="hierarchical_sparse", workers_per_node=2),
    tw.Mean(tw.QSGD(bits=4), exchange="scatter_reduce"),
    *(tw.Mean(TOP, memory) for memory in MEMORIES),
    *(tw.Mean(rule=rule) for rule in RULES),
    tw.Mean(UNBIASED, tw.memory.DIANA()),
    tw.Mean(tw.QSGD(bits=4), tw.memory.LoCo()),
    tw.Mean(tw.SignSGD(), tw.memory.LocalMomentum()),
    tw.Mean(TOP, tw.ErrorFeedback(), clip=tw.average.ClipByNorm(1.0)),
    tw.Mean(tw.Fitted(4.0), tw.ErrorFeedback()),
    *(
        tw.Mean(kind(bucket_size=50, update_steps=(1,), distribution=d))
        for kind in (tw.ALQ, tw.AMQ)
        for d in ("mixture", "pooled")
    ),
    tw.PowerSGD(rank=2),
    tw.average.Dion(rank=2),
]


@pytest.fixture
def default_dtype():
    yield torch.set_default_dtype
    torch.set_default_dtype(torch.float32)


def two_rounds(averager):
    def worker(comm):
        generator = torch.Generator().manual_seed(comm.rank)
        tensors = [
            (name, torch.randn(shape, generator=generator, dtype=torch.float32))
            for name, shape in {"matrix": (40, 15), "vector": (33,)}.items()
        ]
        state = averager.init(tensors, comm, seed=3)
        for _ in range(2):
            averager.step(state, tensors, comm).wait()
            averager.commit(state)
        return [t for _, t in tensors]

    return tw.LocalWorld(4, timeout_seconds=60).run(worker)


@pytest.mark.parametrize("averager", AVERAGERS, ids=repr)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_bits_do_not_depend_on_the_default_dtype(averager, backend, default_dtype):
    with kernels.use_backend(backend):
        expected = two_rounds(averager)
        for dtype in (torch.float64, torch.bfloat16):
            default_dtype(dtype)
            for found, as_before in zip(two_rounds(averager), expected, strict=True):
                assert all(map(torch.equal, found, as_before)), dtype
