"""Programs against real runs, and what predictions say."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from thinwire.plan import Link, Network, predict, record

SHAPES = [torch.Size([64, 48]), torch.Size([48]), torch.Size([33, 17])]
SPARSE = tw.chain(tw.TopK(0.05), tw.QSGD(bits=4))
AVERAGERS = [
    tw.Mean(exchange="all_reduce"),
    tw.Mean(tw.Cast(), exchange="all_reduce"),
    *(tw.Mean(tw.QSGD(bits=4), exchange=name) for name in ("all_gather", "scatter_reduce")),
    tw.Mean(tw.QSGD(bits=4), exchange="hierarchical", workers_per_node=2),
    tw.Mean(SPARSE, tw.ErrorFeedback(), exchange="hierarchical", workers_per_node=2),
    tw.Mean(SPARSE, tw.ErrorFeedback(), exchange="all_gather", granularity="bucket"),
    tw.Mean(tw.TopK(0.05), tw.MomentumCorrection(), exchange="all_gather"),
    tw.Mean(tw.SignNorm(), tw.ErrorFeedback(), exchange="all_gather"),
    tw.PowerSGD(rank=2),
    tw.Mix(tw.Ring()),
    tw.Choco(tw.Ring()),
    tw.PowerGossip(tw.Ring()),
]


def real_ledger(comm, averager):
    generator = torch.Generator().manual_seed(comm.rank)
    tensors = [(f"t{i}", torch.randn(shape, generator=generator)) for i, shape in enumerate(SHAPES)]
    state = averager.init(tensors, comm)
    before = comm.ledger.snapshot()
    averager.step(state, tensors, comm).wait()
    return comm.ledger.since(before)


@pytest.mark.parametrize("averager", AVERAGERS, ids=repr)
def test_predicted_bytes_and_messages_are_those_of_a_real_run(averager):
    for rank, ledger in enumerate(tw.LocalWorld(4).run(real_ledger, averager)):
        predicted = record(averager, SHAPES, rank, size=4, workers_per_node=2).ledger
        assert predicted.as_dict() == ledger.as_dict()


def test_codecs_whose_messages_depend_on_values_are_refused():
    with pytest.raises(ValueError, match="cannot predict TernGrad"):
        record(tw.Mean(tw.TernGrad(shared=True)), SHAPES, 0, 4)


def test_sparse_wins_on_a_slow_network_and_bytes_follow():
    network = Network(4, outer=Link.of("100mbit", "0.5ms"))
    by_name = {p.method: p for p in predict(20_000_000, 0.25, network)}
    dense, sparse = by_name["DDP, float32"], by_name["top-k 1 %, 4 bits, all_gather"]
    assert dense.bytes_sent == pytest.approx(2 * 3 / 4 * 80e6, rel=1e-6)
    assert sparse.speedup_over_fp32 > 10 and sparse.speedup_over_bf16 > 5
    assert sparse.memory_bytes == 2 * 4 * 20_000_000
    assert dense.speedup_over_fp32 == 1.0
    local = by_name["every 20 steps, float32"]
    assert local.bytes_sent == pytest.approx(dense.bytes_sent / 20)


def test_hierarchy_pays_where_workers_share_a_node():
    network = Network(16, 4, outer=Link.of("1gbit", "0.1ms"))
    by_name = {p.method: p for p in predict(20_000_000, 0.1, network)}
    assert by_name["4 bits, hierarchical"].step_seconds < by_name["4 bits, all_gather"].step_seconds / 4
