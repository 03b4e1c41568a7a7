"""The sparse all-reduce, against a float64 simulation of its definition, and its bytes against formulas."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.ledgers import ledger_of_round
from torch import Tensor, nn

import thinwire as tw
from thinwire.average.mean.exchange import EXCHANGES, Load
from thinwire.average.mean.exchange.base import Job
from thinwire.average.mean.exchange.regions import regions
from thinwire.average.mean.exchange.sparse_reduce import (
    SparseReduction,
    header_nbytes,
    layout_of,
    message_sizes,
    parts_of,
)
from thinwire.clock import Clock

SPARSE = tw.TopK(0.1)
CHAIN = tw.chain(tw.TopK(0.1), tw.QSGD(bits=4))
# Tensors that W does not divide, tensors with fewer elements than workers, and dense ones.
SHAPES = {"conv": (8, 3, 3, 3), "bias": (8,), "fc": (11, 41), "tiny": (1, 2), "scale": ()}
ENCODED = ("conv", "fc", "tiny")


def gradients(rank: int, step: int) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return [(name, torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()]


# ---- the definition, in float64, without any communication ----


def multiplier(n: int) -> int:
    a = round(n * (math.sqrt(5) - 1) / 2)
    while math.gcd(a, n) != 1:
        a += 1
    return a


def owners_and_quotas(
    numels: list[int], counts: list[int], size: int
) -> tuple[list[Tensor], dict[tuple[int, int], int]]:
    """The owner of each element of each tensor, and how many elements of each tensor each owner keeps."""
    total, owners, quotas = sum(counts), [], {}
    for s, (n, k) in enumerate(zip(numels, counts, strict=True)):
        before = sum(counts[:s])
        owner_of_position = torch.empty(n, dtype=torch.int64)
        for owner in range(size):
            first = min(max(owner * total // size, before), before + k) - before
            last = min(max((owner + 1) * total // size, before), before + k) - before
            owner_of_position[first * n // k : last * n // k] = owner
            quotas[owner, s] = last - first
        owners.append(owner_of_position[torch.arange(n) * multiplier(n) % n])
    return owners, quotas


def largest(x: Tensor, k: int) -> Tensor:
    return x.abs().argsort(descending=True, stable=True)[:k]


def simulate(size: int, nodes: int, ratio: float, momentum: float, num_steps: int) -> list[dict[str, Tensor]]:
    """Results of each step: error feedback where `momentum` is 0, else momentum correction with masking."""
    numels = [math.prod(SHAPES[name]) for name in ENCODED]
    counts = [max(1, math.ceil(ratio * n)) for n in numels]
    owners, quotas = owners_and_quotas(numels, counts, size // nodes)
    u = [[torch.zeros(n, dtype=torch.float64) for n in numels] for _ in range(size)]
    v = [[torch.zeros(n, dtype=torch.float64) for n in numels] for _ in range(size)]
    dense_u = {name: torch.zeros(SHAPES[name], dtype=torch.float64) for name in SHAPES if name not in ENCODED}
    results = []
    for step in range(num_steps):
        own = [dict(gradients(rank, step)) for rank in range(size)]
        result = {}
        for name, state in dense_u.items():
            state.mul_(momentum).add_(sum(g[name].double() for g in own) / size)
            result[name] = state.clone()
        for s, name in enumerate(ENCODED):
            for rank in range(size):
                u[rank][s] = momentum * u[rank][s] + own[rank][name].double().view(-1)
                v[rank][s] += u[rank][s]
            teams = [range(first, first + nodes) for first in range(0, size, nodes)]
            sums = [torch.stack([v[rank][s] for rank in team]).sum(0) for team in teams]
            selected = [largest(x, counts[s]) for x in sums]
            total = torch.zeros(numels[s], dtype=torch.float64)
            for x, chosen in zip(sums, selected, strict=True):
                total[chosen] += x[chosen]
            kept = torch.zeros(numels[s], dtype=torch.bool)
            for owner in range(size // nodes):
                mine = (owners[s] == owner).nonzero().view(-1)
                kept[mine[largest(total[mine], quotas[owner, s])]] = True
            for team, x, chosen in zip(teams, sums, selected, strict=True):
                delivered = chosen[kept[chosen]]
                x[delivered] = 0
                for rank in team:
                    u[rank][s][delivered] = 0
                    v[rank][s] = x if rank == team[0] else torch.zeros_like(x)
            result[name] = torch.where(kept, total, 0.0).view(SHAPES[name]) / size
        results.append(result)
    return results


def run_steps(comm: tw.comm.Communicator, averager: tw.Mean, num_steps: int) -> tuple[list[dict[str, Tensor]], dict]:
    state, results = averager.init(gradients(comm.rank, 0), comm, seed=5), []
    for step in range(num_steps):
        tensors = gradients(comm.rank, step)
        for handle in [averager.step(state, part, comm) for part in (tensors[3:], tensors[:3])]:
            handle.wait()
        assert averager.commit(state)
        results.append(dict(tensors))
    return results, state.state_dict()["memory"]["residual"]


@pytest.mark.parametrize("momentum", [0.0, 0.7])
@pytest.mark.parametrize(("size", "nodes"), [(1, 1), (2, 1), (3, 1), (8, 1), (4, 2), (6, 2), (6, 3)])
def test_it_is_its_definition(size: int, nodes: int, momentum: float) -> None:
    """Tensors of the model at once, for the sizes of a call make the regions; float32 selects as float64 does here."""
    memory = tw.MomentumCorrection(momentum) if momentum else tw.ErrorFeedback()
    exchange = "sparse_reduce" if nodes == 1 else "hierarchical_sparse"
    averager = tw.Mean(SPARSE, memory, exchange=exchange, workers_per_node=None if nodes == 1 else nodes)

    def worker(comm: tw.comm.Communicator) -> list[dict[str, Tensor]]:
        state, results = averager.init(gradients(comm.rank, 0), comm), []
        for step in range(5):
            tensors = gradients(comm.rank, step)
            averager.step(state, tensors, comm).wait()
            assert averager.commit(state)
            results.append(dict(tensors))
        return results

    everyone = tw.LocalWorld(size).run(worker)
    for step, expected in enumerate(simulate(size, nodes, 0.1, momentum, 5)):
        for results in everyone:
            for name, value in results[step].items():
                assert torch.equal(value, everyone[0][step][name])
                # A few roundings a step of sums below 2^5.
                torch.testing.assert_close(value.double(), expected[name], rtol=0, atol=2.0**-17)
                assert torch.equal(value != 0, expected[name] != 0), (name, step)


# ---- nothing is lost ----

CODECS = [
    SPARSE,
    CHAIN,
    tw.TopK(0.1, sample=0.5),
    tw.TopK(tw.schedule.GeometricWarmup(0.05, num=4, unit="step")),
    tw.codec.BlockwiseTopK(0.1, block=32),
    tw.codec.CoarseGrainedTopK(0.2, chunk=8),
    tw.chain(tw.TopK(0.1), tw.QSGD(bits=4), tw.codec.Huffman(), tw.codec.Rice()),
    tw.chain(tw.TopK(0.1, indices="auto"), tw.Cast()),
]


@pytest.mark.parametrize(
    ("codec", "granularity", "size", "nodes"),
    [
        *((codec, "layer", 5, 1) for codec in CODECS),
        *((codec, "bucket", 6, 2) for codec in CODECS),
        (CODECS[0], "bucket", 5, 1),
        (CODECS[0], "layer", 6, 2),
    ],
    ids=str,
)
def test_nothing_is_lost_by_any_codec(codec: tw.codec.Codec, granularity: str, size: int, nodes: int) -> None:
    """W sum of results + sum of all memories = sum of all gradients, and the same bits on all workers."""
    exchange = "sparse_reduce" if nodes == 1 else "hierarchical_sparse"
    averager = tw.Mean(
        codec,
        tw.ErrorFeedback(),
        exchange=exchange,
        granularity=granularity,
        workers_per_node=None if nodes == 1 else nodes,
    )
    everyone = tw.LocalWorld(size).run(run_steps, averager, 6)
    for name in ENCODED:
        sent = size * sum(result[name].double().view(-1) for result in everyone[0][0])
        kept = sum(memory[name].double() for _, memory in everyone)
        total = sum(dict(gradients(rank, step))[name].double() for rank in range(size) for step in range(6))
        # A few roundings a step of numbers below 2^6, on each worker.
        torch.testing.assert_close(sent + kept, total.view(-1), rtol=0, atol=size * 6 * 2.0**-18)
        for results, _ in everyone:
            assert all(torch.equal(a[name], b[name]) for a, b in zip(results, everyone[0][0], strict=True))


@pytest.mark.parametrize(
    "codec", [tw.TopK(1.0), tw.codec.BlockwiseTopK(1.0), tw.codec.CoarseGrainedTopK(1.0, chunk=8)], ids=repr
)
@pytest.mark.parametrize("size", [1, 3, 8])
def test_with_everything_selected_it_is_the_mean(codec: tw.codec.Codec, size: int) -> None:
    averager = tw.Mean(codec, tw.ErrorFeedback(), exchange="sparse_reduce")
    for results, memory in tw.LocalWorld(size).run(run_steps, averager, 1):
        assert not any(residual.any() for residual in memory.values())
        for name, value in results[0].items():
            mean = sum(dict(gradients(rank, 0))[name].double() for rank in range(size)) / size
            torch.testing.assert_close(value.double(), mean, rtol=0, atol=2.0**-20)


# ---- regions ----


@pytest.mark.parametrize(
    "codec", [SPARSE, tw.TopK(0.1, sample=0.5), tw.codec.CoarseGrainedTopK(0.3, chunk=8)], ids=repr
)
@pytest.mark.parametrize("memory", [None, tw.ErrorFeedback(), tw.MomentumCorrection(0.5)], ids=repr)
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_call_of_dense_tensors_alone_is_the_mean(codec: tw.codec.Codec, memory: tw.memory.Memory, nodes: int) -> None:
    """Such as a bucket of biases and norms."""
    options = (
        {"exchange": "hierarchical_sparse", "workers_per_node": 2} if nodes == 2 else {"exchange": "sparse_reduce"}
    )
    averager = tw.Mean(codec, memory, **options)

    def worker(comm: tw.comm.Communicator) -> list[float]:
        tensors = [("weight", torch.ones(4, 5)), ("bias", torch.full((3,), float(comm.rank)))]
        state = averager.init(tensors, comm)
        for tensor in reversed(tensors):
            averager.step(state, [tensor], comm).wait()
        assert averager.commit(state)
        return tensors[1][1].tolist()

    assert tw.LocalWorld(4).run(worker) == [[1.5] * 3] * 4


@pytest.mark.parametrize("size", [1, 2, 7, 64])
@pytest.mark.parametrize("numels", [(1,), (2, 1, 3), (432, 41472, 165888, 7680), (10**6,)])
def test_regions_share_out_every_coordinate(numels: tuple[int, ...], size: int) -> None:
    counts = tuple(max(1, n // 100) for n in numels)
    layout = regions(numels, counts, size)
    pieces = [piece for region in layout.pieces for piece in region]
    assert [piece.start for piece in pieces] == [
        0,
        *torch.tensor([piece.numel for piece in pieces]).cumsum(0)[:-1].tolist(),
    ]
    assert sum(piece.numel for piece in pieces) == sum(numels)
    assert all(piece.kept <= piece.numel for piece in pieces)
    assert [sum(p.kept for p in pieces if p.segment == s) for s in range(len(numels))] == list(counts)
    kept = [sum(piece.kept for piece in region) for region in layout.pieces]
    assert max(kept) - min(kept) <= 1
    everything = torch.cat([torch.arange(n, dtype=torch.int32) for n in numels])
    positions = layout.positions(everything, list(numels))
    assert torch.equal(positions.sort().values, torch.arange(sum(numels)))
    assert torch.equal(layout.indices(positions, list(numels)), everything)


@pytest.mark.parametrize("kind", ["row", "column", "block"])
def test_hot_parts_of_a_matrix_are_spread_over_all_regions(kind: str) -> None:
    hot = torch.zeros(1000, 1000, dtype=torch.bool)
    {"row": hot[300:310], "column": hot[:, 300:310], "block": hot[300:400, 500:600]}[kind].fill_(True)
    indices = hot.view(-1).nonzero().view(-1).int()
    layout = regions((10**6,), (10**4,), 16)
    counts = torch.tensor(layout.count(layout.positions(indices, [10**4]).sort().values))
    assert counts.sum() == 10**4 and counts.max() <= 1.2 * 10**4 / 16


# ---- bytes ----


def bytes_of_a_step(comm: tw.comm.Communicator, averager: tw.Mean, tensors_of) -> tw.comm.Ledger:
    return ledger_of_round(comm, averager, tensors_of(comm.rank))


@pytest.mark.parametrize("codec", [SPARSE, CHAIN], ids=repr)
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_it_sends_what_its_formula_says(codec: tw.codec.Codec, size: int) -> None:
    """Worker r: headers and coordinates to every owner, and its own message to all."""
    averager, parts = tw.Mean(codec, tw.ErrorFeedback(), exchange="sparse_reduce"), parts_of(codec)
    layout = layout_of(parts, [math.prod(SHAPES[name]) for name in ENCODED], size)
    everyone = tw.LocalWorld(size).run(bytes_of_a_step, averager, lambda rank: gradients(rank, 0))
    for rank, ledger in enumerate(everyone):
        flat = [t.view(-1) for name, t in gradients(rank, 0) if name in ENCODED]
        chosen = [largest(x, k).sort().values.int() for x, k in zip(flat, layout.kept, strict=True)]
        positions = layout.positions(torch.cat(chosen), list(layout.kept))
        expected = (size - 1) * message_sizes(parts, layout, 9)[rank]
        for owner, region in enumerate(layout.pieces):
            if owner == rank:
                continue
            counts = [int(((positions >= p.start) & (positions < p.start + p.numel)).sum()) for p in region]
            dense = 9 // size + (owner < 9 % size)
            expected += header_nbytes(layout)[owner] + parts.nbytes(counts, [p.numel for p in region]) + 4 * dense
        assert ledger.bytes_sent == expected
        assert set(ledger.collectives) <= {"all_to_all", "all_gather"}


@pytest.mark.parametrize("size", [2, 4, 8])
def test_its_cost_is_exact_where_selections_are_even(size: int) -> None:
    """Every worker selects in each region as many coordinates as are kept there."""
    codec, shape = tw.TopK(1 / 16), torch.Size([64, 64])
    layout = layout_of(parts_of(codec), [shape.numel()], size)
    even = torch.cat(
        [torch.arange(piece.start, piece.start + piece.kept) for region in layout.pieces for piece in region]
    )

    def tensors_of(rank: int) -> list[tuple[str, Tensor]]:
        x = torch.zeros(shape)
        x.view(-1)[layout.indices(even, [even.numel()]).long()] = 1.0 + rank
        return [("x", x), ("bias", torch.zeros(8 * size))]

    load = Load(codec, (shape,), 8 * size, size)
    averager = tw.Mean(codec, tw.ErrorFeedback(), exchange="sparse_reduce")
    for ledger in tw.LocalWorld(size).run(bytes_of_a_step, averager, tensors_of):
        assert ledger.bytes_sent == EXCHANGES["sparse_reduce"].cost(load)
        assert ledger.messages == EXCHANGES["sparse_reduce"].steps(size, 1) * (size - 1)


NUMEL = 1_000_000


def random_gradient(rank: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))


def real_gradient(rank: int) -> Tensor:
    """Of a convolutional network on images of a worker's own: large in few filters, and zero where a ReLU is off."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator) for shape in ((96, 1, 3, 3), (290, 96, 3, 3), (290, 290, 3, 3))]
    layers = [w.mul_((2 / w[0].numel()) ** 0.5).requires_grad_() for w in weights]
    x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(1 + rank))
    for layer in layers:
        x = nn.functional.max_pool2d(nn.functional.relu(nn.functional.conv2d(x, layer, padding=1)), 2)
    loss = nn.functional.cross_entropy(x.flatten(1), torch.arange(4) + 4 * rank)
    grads = torch.autograd.grad(loss, layers)
    flat = torch.cat([g.reshape(-1) for g in grads])
    assert flat.numel() >= NUMEL
    return flat[-NUMEL:].clone()


@pytest.mark.parametrize(
    ("size", "gradient"),
    [*((size, random_gradient) for size in (2, 3, 16, 64)), *((size, real_gradient) for size in (4, 32))],
)
def test_two_payloads_a_worker_whatever_their_number(size: int, gradient) -> None:
    """At most 2.5 payloads by any worker, and about 2 on average."""
    codec = tw.TopK(0.01)
    averager = tw.Mean(codec, tw.ErrorFeedback(), exchange="sparse_reduce", min_ndim=0)
    ledgers = tw.LocalWorld(size).run(bytes_of_a_step, averager, lambda rank: [("x", gradient(rank))])
    payloads = [ledger.bytes_sent / codec.nbytes(NUMEL) for ledger in ledgers]
    assert max(payloads) <= 2.5
    assert 2 * (size - 1) / size * 0.98 <= sum(payloads) / size <= 2.2


@pytest.mark.parametrize(("size", "nodes"), [(4, 2), (6, 2), (8, 4)])
def test_between_nodes_leaders_alone_send(size: int, nodes: int) -> None:
    """A member sends its tensors; a leader what a sparse all-reduce of the leaders takes, and the kept coordinates."""
    averager = tw.Mean(SPARSE, tw.MomentumCorrection(), exchange="hierarchical_sparse", workers_per_node=nodes)
    numels = [math.prod(SHAPES[name]) for name in ENCODED]
    parts, teams = parts_of(SPARSE), size // nodes
    layout = layout_of(parts, numels, teams)
    k = sum(layout.kept)
    down = 4 * 9 + 4 * k + parts.coding.indices_nbytes(list(layout.kept), numels) + (k + 7) // 8
    sent = [
        ledger.bytes_sent for ledger in tw.LocalWorld(size).run(bytes_of_a_step, averager, lambda r: gradients(r, 0))
    ]
    between = [n - (nodes - 1) * down for n in sent[::nodes]]
    assert all(n == 4 * (sum(numels) + 9) for rank, n in enumerate(sent) if rank % nodes)
    load = Load(SPARSE, tuple(torch.Size(SHAPES[name]) for name in ENCODED), 9, size, nodes)
    assert sum(between) / teams == pytest.approx(EXCHANGES["hierarchical_sparse"].cost(load), rel=0.1)


# ---- mistakes ----


@pytest.mark.parametrize("codec", [tw.QSGD(bits=4), tw.RandomK(0.1), tw.Threshold(0.1), tw.codec.Identity()], ids=repr)
@pytest.mark.parametrize("exchange", ["sparse_reduce", "hierarchical_sparse"])
def test_codecs_that_do_not_keep_the_largest_are_refused(codec: tw.codec.Codec, exchange: str) -> None:
    with pytest.raises(ValueError, match="does not choose by magnitude how many it keeps; use TopK"):
        tw.Mean(codec, tw.ErrorFeedback(), exchange=exchange)


# ---- exchanges in flight ----


class Recorded:
    """A communicator that notes the collectives that it is asked for."""

    def __init__(self, comm: tw.comm.Communicator):
        self._comm, self.calls = comm, []

    def __getattr__(self, name: str):
        value = getattr(self._comm, name)
        if name not in ("all_reduce", "all_gather", "all_to_all", "exchange"):
            return value

        def call(*args, **options):
            self.calls.append(name)
            return value(*args, **options)

        return call


def collectives_of_three_buckets(comm: tw.comm.Communicator, averager: tw.Mean) -> list[list[str]]:
    recorded, buckets = Recorded(comm), [[(f"x{i}", torch.full((8, 8), 1.0 + i))] for i in range(3)]
    state = averager.init([pair for bucket in buckets for pair in bucket], comm)
    handles, calls = [], []
    for bucket in buckets:
        handles.append(averager.step(state, bucket, recorded))
        calls.append(recorded.calls[sum(map(len, calls)) :])
    for handle in handles:
        handle.wait()
    calls.append(recorded.calls[sum(map(len, calls)) :])
    averager.commit(state)
    return calls


def test_buckets_are_in_flight_at_once() -> None:
    """A step sends the first message of its bucket, and then the next one of each bucket before it."""
    to, from_ = "all_to_all", "all_gather"
    scatter = tw.Mean(tw.QSGD(bits=4), exchange="scatter_reduce")
    expected = [[to], [to, from_], [to, from_], [from_]]
    assert tw.LocalWorld(3).run(collectives_of_three_buckets, scatter) == [expected] * 3
    sparse = tw.Mean(SPARSE, tw.ErrorFeedback(), exchange="sparse_reduce")
    expected = [[to], [to, to], [to, from_, to], [from_, to, from_]]
    assert tw.LocalWorld(3).run(collectives_of_three_buckets, sparse) == [expected] * 3
    nodes = tw.Mean(tw.QSGD(bits=4), exchange="hierarchical", workers_per_node=2)
    leader, member, *_ = tw.LocalWorld(4).run(collectives_of_three_buckets, nodes)
    assert [len(calls) for calls in leader[:3]] == [1, 2, 4] and [len(calls) for calls in member[:3]] == [1, 1, 3]


@pytest.mark.parametrize("num_dense", [0, 2])
def test_who_owns_nothing_sends_from_where_the_others_do(num_dense: int) -> None:
    """Of a bucket that keeps fewer coordinates than there are workers; "meta" stands for a GPU."""
    dense = torch.empty(4 * num_dense, device="meta")
    segments = [torch.empty(10, device="meta")]
    team: Any = SimpleNamespace(rank=0, size=4)
    job = Job(team, SPARSE, Clock(), segments, ["x"], [tw.codec.Key()], False, True, dense, 1.0)
    reduction = SparseReduction(job, team, segments, dense)
    assert [len(region) for region in reduction.layout.pieces] == [0, 0, 0, 1]
    message = reduction._encode_sum(dense[:num_dense], [])
    assert message.device == dense.device and message.numel() == 4 * num_dense
