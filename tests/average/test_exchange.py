"""The exchanges of `Mean`, against plain simulations, against their formulas, and over real processes."""

from __future__ import annotations

import copy
import hashlib
import importlib.metadata
import math
import os
import warnings
import zlib
from dataclasses import dataclass

import pytest
import torch
from helpers.ledgers import ledger_of_round
from helpers.one_stream import operations_of, stuck
from helpers.spawn import spawn
from helpers.states import leaves
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.average.mean.exchange import EXCHANGES, Load, cheapest, scatter_reduce, words
from thinwire.average.mean.exchange.base import pack, unpack
from thinwire.average.mean.exchange.scatter_reduce import shard_nbytes
from thinwire.kernels import flags

SPARSE_EXCHANGES = [word for word, exchange in EXCHANGES.items() if exchange.selects_again]
SPARSE, QUANTIZED = tw.TopK(0.1), tw.QSGD(bits=4)
CHAIN = tw.chain(tw.TopK(0.1), tw.QSGD(bits=4))
# Tensors that W does not divide, and tensors with fewer elements than workers.
SHAPES = {"conv.weight": (8, 3, 3, 3), "conv.bias": (8,), "fc.weight": (11, 41), "tiny": (1, 2), "scale": ()}


@dataclass(frozen=True, repr=False)
class Above(tw.codec.Codec):
    """Elements above a threshold, as [indices int32][values float32]: a codec whose payload has no fixed size."""

    threshold: float
    traits = tw.codec.Traits(fixed_size=False)

    def encode_segments(self, segments, keys, residuals):
        x = torch.cat(segments)
        indices = x.abs().gt(self.threshold).nonzero().view(-1).int()
        kept = x[indices]
        for r, s in zip(residuals or [], segments, strict=False):
            r.copy_(torch.where(s.abs() > self.threshold, torch.zeros_like(s), s))
        return torch.cat([indices.view(torch.uint8), kept.view(torch.uint8)])

    def decode_add_segments(self, payload, outs, weight, keys):
        indices, values = payload.view(torch.int32).chunk(2)
        total = torch.zeros(sum(o.numel() for o in outs))
        total[indices.long()] = values.view(torch.float32)
        for o, part in zip(outs, total.split([o.numel() for o in outs]), strict=True):
            o.add_(part, alpha=weight)

    def segments_nbytes(self, numels):
        return 8 * sum(numels)


def gradients(rank, step):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return [(name, torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()]


def mean_of(codec, exchange, nodes=None, memory=True, **fields):
    return tw.Mean(codec, tw.ErrorFeedback() if memory else None, exchange=exchange, workers_per_node=nodes, **fields)


def run_steps(comm, averager, num_steps=3, scale=1.0, state=None, start=0):
    """The results of some rounds, in which all tensors are stepped before the first is waited for."""
    state = averager.init(gradients(comm.rank, 0), comm, seed=5) if state is None else state
    results = []
    for step in range(start, start + num_steps):
        tensors = [(name, scale * g) for name, g in gradients(comm.rank, step)]
        calls = [tensors] if averager.traits.whole_model else [tensors[3:], tensors[:3]]
        for handle in [averager.step(state, part, comm, scale) for part in calls]:
            handle.wait()
        assert averager.commit(state)
        results.append({name: t / scale for name, t in tensors})
    return results, state


def assert_equal(some, others):
    for a, b in zip(some, others, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert torch.equal(a[name], b[name]), name


# ---- what the result is ----


def key(name, rank, part, step):
    return tw.codec.Key(5, zlib.crc32(name.encode()) | rank << 32 | part << 48, step)


def simulated_scatter_reduce(codec, memory, size, num_steps):
    """The definition, tensor by tensor and piece by piece, without any communication."""
    first = [{name: torch.zeros(shape).view(-1) for name, shape in SHAPES.items()} for _ in range(size)]
    second = {name: torch.zeros(shape).view(-1) for name, shape in SHAPES.items()}
    for step in range(num_steps):
        result = {}
        for name, shape in SHAPES.items():
            own = [dict(gradients(rank, step))[name].view(-1) for rank in range(size)]
            if len(shape) < 2:
                total = torch.zeros_like(own[0])
                for g in own:
                    total.add_(g * (1.0 / size))
                result[name] = total.view(shape)
                continue
            x = [g + e[name] if memory else g for g, e in zip(own, first, strict=True)]
            out = torch.zeros_like(own[0])
            for owner, piece in enumerate(out.tensor_split(size)):
                e2 = second[name].tensor_split(size)[owner]
                if not piece.numel():
                    continue
                mean = torch.zeros_like(piece)
                for rank in range(size):
                    mine, e1 = x[rank].tensor_split(size)[owner], first[rank][name].tensor_split(size)[owner]
                    codec.decode_add(codec.encode(mine, key(name, rank, owner + 1, step), e1), mean, 1.0 / size)
                payload = codec.encode(mean + e2 if memory else mean, key(name, owner, 0xFFFF, step), e2)
                codec.decode_add(payload, piece)
            result[name] = out.view(shape)
        yield result


@pytest.mark.parametrize(("size", "memory"), [(1, True), (3, True), (4, False), (8, True)])
@pytest.mark.parametrize("codec", [SPARSE, QUANTIZED, CHAIN, tw.codec.SignNorm(), tw.Cast(), Above(0.7)], ids=repr)
def test_scatter_reduce_is_its_definition(codec, memory, size):
    everyone = tw.LocalWorld(size).run(lambda comm: run_steps(comm, mean_of(codec, "scatter_reduce", memory=memory))[0])
    expected = list(simulated_scatter_reduce(codec, memory, size, 3))
    for results in everyone:
        assert_equal(results, expected)


def simulated_hierarchical(codec, memory, size, nodes, num_steps):
    """The definition: each node's mean is encoded, with a memory of the node in units of its sum."""
    memories = [{name: torch.zeros(shape) for name, shape in SHAPES.items()} for _ in range(size // nodes)]
    for step in range(num_steps):
        result = {}
        for name, shape in SHAPES.items():
            result[name] = torch.zeros(shape)
            for node, e in enumerate(memories):
                own = [dict(gradients(node * nodes + i, step))[name] for i in range(nodes)]
                encoded = len(shape) >= 2
                total = own[0] + e[name] if memory and encoded else own[0].clone()
                for g in own[1:]:
                    total += g
                if not encoded:
                    result[name].add_(total * (1.0 / size))
                    continue
                lost = torch.zeros(shape)
                payload = codec.encode(total / nodes, key(name, node * nodes, 0, step), lost)
                codec.decode_add(payload, result[name], nodes / size)
                e[name] = lost * nodes
        yield result


NODES = [(1, 1), (3, 3), (4, 2), (6, 3), (8, 2), (8, 4)]
CODECS = [tw.codec.Identity(), SPARSE, QUANTIZED, Above(0.7)]
# Every codec with all nodes; each codec, and each choice of nodes, with and without memory.
IN_NODES = [(c, (i + j) % 2 == 0, *n) for i, c in enumerate(CODECS) for j, n in enumerate(NODES)]


@pytest.mark.parametrize(("codec", "memory", "size", "nodes"), IN_NODES, ids=str)
def test_hierarchical_is_its_definition(codec, memory, size, nodes):
    averager = mean_of(codec, "hierarchical", nodes, memory, min_ndim=2 if codec != tw.codec.Identity() else 0)
    everyone = tw.LocalWorld(size).run(lambda comm: run_steps(comm, averager)[0])
    expected = list(simulated_hierarchical(codec, memory, size, nodes, 3))
    for results in everyone:
        assert_equal(results, everyone[0])
        if codec != tw.codec.Identity():
            assert_equal(results, expected)
        else:  # the biases are encoded as well: L terms are added instead of W
            for a, b in zip(results, expected, strict=True):
                assert all(torch.allclose(a[name], b[name], rtol=0, atol=1e-6) for name in a)


def test_nodes_of_one_worker_are_an_all_gather():
    flat, nodes = mean_of(CHAIN, "all_gather"), mean_of(CHAIN, "hierarchical", 1)
    a, b = (tw.LocalWorld(3).run(lambda comm, averager=m: run_steps(comm, averager)[0])[0] for m in (flat, nodes))
    assert_equal(a, b)


def suited(codec, exchange):
    """The codec, or one that keeps the largest coordinates for the exchanges that need it."""
    if exchange not in SPARSE_EXCHANGES or codec.traits.sparse is not None:
        return codec
    return {QUANTIZED: CHAIN, tw.codec.SignNorm(): tw.chain(SPARSE, tw.codec.SignNorm())}.get(
        codec, tw.codec.BlockwiseTopK(0.1, block=16)
    )


EXCHANGED = [
    ("scatter_reduce", 3, None),
    ("scatter_reduce", 4, None),
    ("hierarchical", 4, 2),
    ("hierarchical", 6, 3),
    ("sparse_reduce", 3, None),
    ("sparse_reduce", 4, None),
    ("hierarchical_sparse", 6, 2),
]
every_exchange = pytest.mark.parametrize(("exchange", "size", "nodes"), EXCHANGED)


# Every codec with every granularity, and each of these pairs with two exchanges or more.
LOSSY, GRANULARITIES = [SPARSE, CHAIN, tw.codec.SignNorm(), tw.codec.SVD(rank=1)], ["layer", "bucket", "model"]
COMBINED = [(*e, GRANULARITIES[(i + j) % 3], c) for i, e in enumerate(EXCHANGED) for j, c in enumerate(LOSSY)]


@pytest.mark.parametrize(("exchange", "size", "nodes", "granularity", "codec"), COMBINED, ids=str)
def test_nothing_is_lost(exchange, size, nodes, granularity, codec):
    """W sum of results + all memories + W (all owners' memories) = sum of all gradients, to float32 rounding."""
    codec = suited(codec, exchange)
    averager = mean_of(codec, exchange, nodes, granularity=granularity)
    num_steps = 6
    everyone = tw.LocalWorld(size).run(lambda comm: run_steps(comm, averager, num_steps))
    for results, _ in everyone:
        assert_equal(results, everyone[0][0])
    states = [state.state_dict() for _, state in everyone]
    for name in ("conv.weight", "fc.weight", "tiny"):
        total = sum(dict(gradients(rank, step))[name].double() for rank in range(size) for step in range(num_steps))
        kept = sum(s["memory"]["residual"][name].double() for s in states)
        if exchange == "scatter_reduce":
            kept = kept + size * torch.cat([s["owner_memory"]["residual"][name].double() for s in states])
        elif nodes is not None:
            members = [s["memory"]["residual"][name] for rank, s in enumerate(states) if rank % nodes]
            assert not torch.cat(members).any()
        sent = size * sum(r[name].double() for r in everyone[0][0])
        # A few roundings a step of numbers below 2^6, on each worker.
        torch.testing.assert_close((sent.view(-1) + kept), total.view(-1), rtol=0, atol=size * num_steps * 2.0**-18)


RICE = tw.chain(SPARSE, tw.codec.Rice())  # its payload has no fixed size
ORDERED = [
    (tw.Mean(suited(codec, e), tw.ErrorFeedback(), exchange=e, workers_per_node=n), w)
    for e, w, n in [("all_gather", 3, None), ("hierarchical", 2, 2), *EXCHANGED]
    for codec in (QUANTIZED, RICE)
] + [(tw.Mean(), 3), (tw.PowerSGD(rank=2), 3), (tw.average.Dion(rank=2), 3)]


@pytest.mark.parametrize(("averager", "size"), ORDERED, ids=str)
@pytest.mark.parametrize("num_buckets", [1, 2, 3, 5])
def test_buckets_end_where_each_worker_runs_one_operation_after_another(averager, size, num_buckets):
    """As over NCCL: what a worker has issued first must not wait for what another one issues last."""

    def rounds(comm):
        buckets = [[(f"{b}.weight", torch.ones(9, 40)), (f"{b}.bias", torch.ones(9))] for b in range(num_buckets)]
        state = averager.init([pair for bucket in buckets for pair in bucket], comm)
        for _ in range(2):
            for handle in [averager.step(state, bucket, comm) for bucket in buckets]:
                handle.wait()
            averager.commit(state)

    issued = operations_of(size, rounds)
    assert all(issued)
    assert not stuck(copy.deepcopy(issued), buffered=False)
    assert not stuck(issued, buffered=True)


@pytest.mark.parametrize("granularity", ["layer", "bucket"])
@pytest.mark.parametrize(
    "codec",
    [QUANTIZED, CHAIN, tw.RandomK(0.1, shared=True), tw.codec.SVD(rank=1), tw.SignSGD(), tw.Cast("float8_e5m2")],
)
def test_one_call_of_the_codec_for_all_owners_gives_the_same(codec, granularity, monkeypatch):
    """As on a GPU; all owners' payloads are cut from one and joined to one."""
    averager = mean_of(codec, "scatter_reduce", memory=not codec.traits.votes, granularity=granularity)
    calls, encode = [], type(codec).encode
    monkeypatch.setattr(type(codec), "encode", lambda *args: calls.append(0) or encode(*args))

    def run():
        calls.clear()
        everyone = tw.LocalWorld(3).run(run_steps, averager)
        return [results for results, _ in everyone], [state.state_dict() for _, state in everyone], len(calls)

    with monkeypatch.context() as patch:
        patch.setattr(scatter_reduce, "_sections", lambda job: None)
        expected, memories, num_calls = run()
    monkeypatch.setattr(flags, "in_main_memory", lambda device: False)
    together, same, fewer = run()
    for some, others in zip(together, expected, strict=True):
        assert_equal(some, others)
    for some, others in zip(map(leaves, same), map(leaves, memories), strict=True):
        assert_equal([some], [others])
    steps = (
        3 * 3 * (1 if averager.traits.whole_model else 2)
    )  # of all workers; each encodes the sum of what it owns, too
    assert fewer <= 2 * steps < num_calls


def test_scatter_reduce_of_an_unbiased_codec_is_unbiased():
    """Mean over 1500 keys within 5 standard errors of the mean gradient, for each of 64 elements.

    A key depends on the tensor's name and the step: 30 rounds of 50 equal tensors.
    """
    averager, trials = tw.Mean(tw.QSGD(bits=2, bucket_size=16), exchange="scatter_reduce"), 1500

    def worker(comm):
        x = torch.randn(64, 1, generator=torch.Generator().manual_seed(comm.rank))
        names = [f"x{i}" for i in range(50)]
        state, results = averager.init([(name, x) for name in names], comm), []
        for _ in range(trials // len(names)):
            tensors = [(name, x.clone()) for name in names]
            averager.step(state, tensors, comm).wait()
            averager.commit(state)
            results += [y for _, y in tensors]
        return x, torch.stack(results).double()

    everyone = tw.LocalWorld(2).run(worker)
    results, expected = everyone[0][1], sum(x.double() for x, _ in everyone) / 2
    standard_error = results.std(0) / trials**0.5
    assert ((results.mean(0) - expected).abs() <= 5 * standard_error + 1e-6).all()


# ---- scales, infinities, checkpoints ----


@pytest.mark.parametrize(
    "codec", [tw.Threshold(1.5), tw.chain(tw.Threshold(1.5), tw.QSGD(bits=4)), tw.RandomK(0.5)], ids=repr
)
def test_a_loss_scale_changes_nothing_without_memory(codec):
    plain, scaled = (tw.LocalWorld(2).run(run_steps, tw.Mean(codec), 3, s) for s in (1.0, 1024.0))
    for (a, _), (b, _) in zip(plain, scaled, strict=True):
        assert_equal(a, b)


def memories(state):
    """Copies of all memories of a worker."""
    saved = state.state_dict()
    return [leaves(saved[kind]) for kind in ("memory", "owner_memory") if saved[kind] is not None]


BAD = [("fc.weight", math.inf), ("fc.weight", math.nan), ("tiny", math.inf), ("conv.bias", math.nan)]
# Each exchange with two of them, and each of them with three exchanges or more.
BROKEN = [(*e, *BAD[(i + j) % 4]) for i, e in enumerate(EXCHANGED) for j in (0, 2)]


@pytest.mark.parametrize(("exchange", "size", "nodes", "name", "bad"), BROKEN)
def test_an_infinite_gradient_on_one_worker(exchange, size, nodes, name, bad):
    """No worker's result is finite, every memory stays as it was, and the next step is as if it had not been."""
    averager = mean_of(SPARSE, exchange, nodes)

    def worker(comm):
        _, state = run_steps(comm, averager, 2)
        before, progress = memories(state), state.progress
        assert any(value.any() for kind in before for value in kind.values()) or comm.rank % (nodes or 1)
        tensors = gradients(comm.rank, 7)
        if comm.rank == size - 1:
            dict(tensors)[name].view(-1)[-1] = bad
        averager.step(state, tensors, comm).wait()
        assert not averager.commit(state)
        assert not torch.isfinite(dict(tensors)[name]).all()
        assert_equal(memories(state), before)
        state.progress = progress
        return run_steps(comm, averager, 1, state=state, start=2)[0]

    clean = tw.LocalWorld(size).run(lambda comm: run_steps(comm, averager, 3)[0])
    for got, expected in zip(tw.LocalWorld(size).run(worker), clean, strict=True):
        assert_equal(got, expected[2:])


@every_exchange
def test_a_discarded_round_leaves_no_trace(exchange, size, nodes):
    averager = mean_of(SPARSE, exchange, nodes)

    def worker(comm):
        _, state = run_steps(comm, averager, 2)
        averager.step(state, gradients(comm.rank, 7), comm).wait()
        averager.discard(state)
        return run_steps(comm, averager, 1, state=state, start=2)[0]

    clean = tw.LocalWorld(size).run(lambda comm: run_steps(comm, averager, 3)[0])
    for got, expected in zip(tw.LocalWorld(size).run(worker), clean, strict=True):
        assert_equal(got, expected[2:])


@every_exchange
def test_a_saved_state_goes_on_as_if_nothing_had_happened(exchange, size, nodes, tmp_path):
    averager = mean_of(CHAIN, exchange, nodes)

    def worker(comm):
        _, state = run_steps(comm, averager, 2)
        torch.save(state.state_dict(), tmp_path / f"{comm.rank}.pt")
        resumed = averager.init(gradients(comm.rank, 0), comm, seed=5)
        resumed.load_state_dict(torch.load(tmp_path / f"{comm.rank}.pt", weights_only=True))
        return run_steps(comm, averager, 2, state=resumed, start=2)[0]

    clean = tw.LocalWorld(size).run(lambda comm: run_steps(comm, averager, 4)[0])
    for got, expected in zip(tw.LocalWorld(size).run(worker), clean, strict=True):
        assert_equal(got, expected[2:])


def test_a_state_of_another_world_does_not_load():
    averager = mean_of(SPARSE, "scatter_reduce")
    saved = tw.LocalWorld(4).run(lambda comm: run_steps(comm, averager, 1)[1].state_dict())[0]

    def worker(comm, averager, message):
        with pytest.raises(ValueError, match=message):
            averager.init(gradients(comm.rank, 0), comm).load_state_dict(saved)

    tw.LocalWorld(2).run(worker, averager, "'conv.weight' has 54 elements, expected 108")
    tw.LocalWorld(2).run(worker, mean_of(SPARSE, "all_gather"), "has owner_memory; use the averager")


# ---- bytes ----


def bytes_of_a_step(comm, averager, shapes):
    return ledger_of_round(comm, averager, [(name, torch.ones(shape)) for name, shape in shapes.items()])


@pytest.mark.parametrize("codec", [tw.codec.Identity(), SPARSE, QUANTIZED, CHAIN, tw.codec.SignNorm()], ids=repr)
@pytest.mark.parametrize("granularity", ["layer", "bucket"])
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_scatter_reduce_sends_what_its_formula_says(codec, granularity, size):
    """Worker s: the messages of all other shards, and its own to all others; W = 2, 3, 4, 8, exactly."""
    averager = mean_of(codec, "scatter_reduce", granularity=granularity)
    encoded = [torch.Size(s) for s in SHAPES.values() if len(s) >= 2 or codec == tw.codec.Identity()]
    dense = 0 if codec == tw.codec.Identity() else 9
    m = shard_nbytes(codec, encoded, dense, size, merged=granularity != "layer")
    for rank, ledger in enumerate(tw.LocalWorld(size).run(bytes_of_a_step, averager, SHAPES)):
        assert ledger.collectives["all_to_all"].bytes_sent == sum(m) - m[rank]
        assert ledger.collectives["all_gather"].bytes_sent == (size - 1) * m[rank]
        assert ledger.messages == sum(x > 0 for r, x in enumerate(m) if r != rank) + (size - 1) * (m[rank] > 0)
        assert ledger.bytes_received == (size - 1) * m[rank] + sum(m) - m[rank]


def test_shards_are_as_even_as_can_be():
    """Within one element a tensor; so a worker's bytes are 2(W-1)/W p and a few scales."""
    codec, shapes = tw.QSGD(bits=4), [torch.Size([1000, 1000])]
    m = shard_nbytes(codec, shapes, 0, 8, merged=False)
    assert max(m) - min(m) <= 5
    assert sum(m) <= codec.nbytes(10**6) + 8 * 4


@pytest.mark.parametrize("codec", [tw.codec.Identity(), SPARSE, QUANTIZED], ids=repr)
@pytest.mark.parametrize(("size", "nodes"), [(2, 1), (2, 2), (3, 1), (3, 3), (4, 2), (8, 2), (8, 4), (8, 8)])
def test_hierarchical_sends_what_its_formula_says(codec, size, nodes):
    averager = mean_of(codec, "hierarchical", nodes)
    encoded = [torch.Size(s) for s in SHAPES.values() if len(s) >= 2 or codec == tw.codec.Identity()]
    n, dense = sum(s.numel() for s in encoded), 0 if codec == tw.codec.Identity() else 9
    m, num_nodes = codec.nbytes(encoded) + 4 * dense, size // nodes
    down = min(num_nodes * m, 4 * (n + dense))
    for rank, ledger in enumerate(tw.LocalWorld(size).run(bytes_of_a_step, averager, SHAPES)):
        expected = 4 * (n + dense) if rank % nodes else (num_nodes - 1) * m + (nodes - 1) * down
        assert ledger.bytes_sent == expected
        assert set(ledger.collectives) <= {"exchange", "all_to_all"}


# ---- messages ----


@pytest.mark.parametrize("offset", range(5))
def test_messages_may_start_at_any_address(offset):
    message = pack(torch.tensor([1.0, -2.0, 3.0]), torch.tensor([7, 8, 9], dtype=torch.uint8))
    received = torch.cat([torch.zeros(offset, dtype=torch.uint8), message])[offset:]
    dense, payload = unpack(received, 3)
    assert dense.tolist() == [1.0, -2.0, 3.0] and payload.tolist() == [7, 8, 9]


# ---- auto ----


@pytest.mark.parametrize(
    ("averager", "size", "exchange"),
    [
        (tw.Mean(), 8, "all_reduce"),
        (tw.Mean(tw.Cast(), tw.ErrorFeedback()), 3, "all_reduce"),
        (tw.Mean(tw.Cast(), workers_per_node=4), 4, "all_reduce"),  # nothing leaves the node
        (tw.Mean(tw.Cast(), workers_per_node=4), 8, "hierarchical"),  # as many bytes, and fewer than around NCCL's ring
        (tw.Mean(SPARSE, tw.ErrorFeedback()), 2, "all_gather"),
        (tw.Mean(SPARSE, tw.ErrorFeedback()), 8, "sparse_reduce"),
        (tw.Mean(SPARSE, tw.ErrorFeedback()), 4, "all_gather"),  # half the bytes, and a quarter of the coordinates
        (tw.Mean(SPARSE, tw.MomentumCorrection()), 6, "sparse_reduce"),
        (tw.Mean(CHAIN, tw.ErrorFeedback(), granularity="model"), 8, "sparse_reduce"),
        (tw.Mean(SPARSE), 8, "all_gather"),  # without a memory, what the owners drop would be lost
        (tw.Mean(tw.Threshold(0.1), tw.ErrorFeedback()), 8, "all_gather"),  # nobody knows how many to keep
        (tw.Mean(SPARSE, tw.ErrorFeedback(), workers_per_node=4), 8, "hierarchical"),
        (tw.Mean(SPARSE, tw.MomentumCorrection(), workers_per_node=4), 8, "hierarchical_sparse"),
        (tw.Mean(SPARSE, tw.ErrorFeedback(), workers_per_node=2), 16, "hierarchical_sparse"),
        (tw.Mean(QUANTIZED), 4, "all_gather"),  # half the bytes do not pay for a second loss
        (tw.Mean(QUANTIZED), 8, "scatter_reduce"),
        (tw.Mean(QUANTIZED, tw.ErrorFeedback(), granularity="model"), 8, "scatter_reduce"),
        (tw.Mean(QUANTIZED, workers_per_node=1), 8, "scatter_reduce"),
        (tw.Mean(QUANTIZED, workers_per_node=2), 8, "hierarchical"),
        (tw.Mean(SPARSE, workers_per_node=4), 8, "hierarchical"),
    ],
    ids=lambda value: str(value),
)
def test_auto_takes_the_cheapest_that_suits(averager, size, exchange):
    shapes = {"w": (64, 64), "bias": (64,)}

    def worker(comm):
        tensors = [(name, torch.zeros(shape)) for name, shape in shapes.items()]
        return averager.init(tensors, comm).exchange

    assert tw.LocalWorld(size).run(worker) == [exchange] * size


def test_auto_is_never_dearer_than_what_it_refuses_but_for_the_second_loss():
    for size in range(1, 20):
        for codec in (tw.Cast(), SPARSE, QUANTIZED, tw.codec.SignNorm()):
            load = Load(codec, (torch.Size([512, 512]), torch.Size([7, 7])), 512, size)
            # Without a memory or nodes, a sparse all-reduce does not suit.
            suited = [
                e for e in EXCHANGES if e not in SPARSE_EXCHANGES and (e != "all_reduce" or codec.traits.summable)
            ]
            chosen = cheapest(load).word
            assert EXCHANGES[chosen].cost(load) <= 2 * min(
                EXCHANGES[e].cost(load) for e in suited if e != "scatter_reduce" or codec.traits.unbiased
            )
            assert chosen != "scatter_reduce" or (size > 4 and codec.traits.unbiased)


# ---- nodes ----


def init_worker(comm, averager, local_world_sizes):
    if local_world_sizes is not None:
        os.environ["LOCAL_WORLD_SIZE"] = local_world_sizes[comm.rank]
    try:
        return averager.init(gradients(comm.rank, 0), comm).workers_per_node
    finally:
        os.environ.pop("LOCAL_WORLD_SIZE", None)


def test_torchrun_says_how_many_workers_share_a_node():
    averager = tw.Mean(SPARSE, exchange="hierarchical")
    assert spawn(4, init_worker, averager, ["2"] * 4) == [2] * 4
    for sizes, message in (
        (["2", "2", "2", "4"], "workers per node.*rank 3"),
        (["3"] * 4, "4 workers cannot form nodes of 3"),
        (["many"] * 4, "4 workers cannot form nodes of many"),
        (None, "torchrun.*LOCAL_WORLD_SIZE"),
    ):
        for error in spawn(4, init_worker, averager, sizes, return_errors=True):
            assert isinstance(error, ValueError)
            with pytest.raises(ValueError, match=message):
                raise error


def joined_worker(comm, averager, local_world_sizes):
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    try:
        [state] = tw.LocalWorld(1).run(lambda alone: averager.init(gradients(comm.rank, 0), alone))
        os.environ["LOCAL_WORLD_SIZE"] = local_world_sizes[comm.rank]
        averager.regroup(state, gradients(comm.rank, 0), comm)
        return state.workers_per_node
    finally:
        os.environ.pop("LOCAL_WORLD_SIZE", None)


def test_every_worker_is_a_node_where_others_join_that_share_theirs_with_another_number():
    averager = tw.Mean(SPARSE, exchange="hierarchical")
    for sizes, nodes in (["2"] * 4, 2), (["2", "2", "1", "1"], 1), (["3"] * 4, 1):
        assert spawn(4, joined_worker, averager, sizes) == [nodes] * 4


def launched_worker(comm, averager, places):
    local_size, local_rank = places[comm.rank]
    launcher = {"WORLD_SIZE": str(comm.size), "LOCAL_WORLD_SIZE": local_size, "LOCAL_RANK": local_rank}
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name, value in launcher.items():
            patch.setenv(name, value)
        before = comm.ledger.bytes_sent
        state = averager.init(gradients(comm.rank, 0), comm)
        warned = sum("ignores nodes" in str(w.message) for w in caught)
        return [state.exchange, state.workers_per_node, warned, comm.ledger.bytes_sent - before]


TWO_NODES = [("2", "0"), ("2", "1"), ("2", "0"), ("2", "1")]
ONE_NODE = [("4", str(rank)) for rank in range(4)]
UNEVEN = [("1", "0"), ("3", "0"), ("3", "1"), ("3", "2")]
CYCLIC = [("2", "0"), ("2", "0"), ("2", "1"), ("2", "1")]


def test_auto_uses_the_nodes_that_the_launcher_says():
    sparse, masked = tw.Mean(SPARSE), tw.Mean(SPARSE, tw.MomentumCorrection(0.9))
    assert [answer[:3] for answer in spawn(4, launched_worker, sparse, TWO_NODES)] == [["hierarchical", 2, 0]] * 4
    assert [answer[:3] for answer in spawn(4, launched_worker, masked, TWO_NODES)] == [
        ["hierarchical_sparse", 2, 0]
    ] * 4
    fixed = tw.Mean(tw.QSGD(bits=4), tw.MomentumCorrection(0.9))
    assert [answer[:3] for answer in spawn(4, launched_worker, fixed, TWO_NODES)] == [["all_gather", 1, 0]] * 4


@pytest.mark.parametrize("places", [UNEVEN, CYCLIC])
def test_auto_warns_once_where_ranks_do_not_fill_equal_nodes(places):
    answers = spawn(4, launched_worker, tw.Mean(SPARSE), places)
    assert [answer[:3] for answer in answers] == [["all_gather", 1, 1]] + [["all_gather", 1, 0]] * 3


def test_auto_sends_nothing_more_on_one_node():
    alone = spawn(4, launched_worker, tw.Mean(SPARSE), ONE_NODE)
    chosen = spawn(4, launched_worker, tw.Mean(SPARSE, exchange="all_gather"), ONE_NODE)
    assert alone[0][:3] == ["all_gather", 1, 0] and [a[3] for a in alone] == [c[3] for c in chosen]


def test_auto_needs_more_than_the_size_of_one_node(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    worker = lambda comm: tw.Mean(SPARSE).init(gradients(comm.rank, 0), comm).exchange  # noqa: E731
    assert tw.LocalWorld(4).run(worker) == ["all_gather"] * 4


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: tw.Mean(workers_per_node=0), "workers_per_node must be an integer, 1 or more, or None, got 0"),
        (lambda: tw.Mean(exchange="all_gather", workers_per_node=2), "does not use workers_per_node=2"),
        (lambda: tw.Mean(exchange="scatter"), "exchange must be one of auto, all_reduce, all_gather, scatter_reduce"),
    ],
)
def test_mistakes(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_workers_that_cannot_be_split_into_nodes():
    def worker(comm):
        with pytest.raises(ValueError, match="3 workers cannot form nodes of 2 each"):
            mean_of(SPARSE, "hierarchical", 2).init(gradients(comm.rank, 0), comm)

    tw.LocalWorld(3).run(worker)


# ---- real processes ----


def process_worker(comm, averager):
    torch.set_num_threads(1)
    results, state = run_steps(comm, averager)
    return results, state.state_dict()


@pytest.mark.parametrize(
    ("size", "averager"),
    [
        (2, mean_of(CHAIN, "scatter_reduce")),
        (3, mean_of(SPARSE, "scatter_reduce", granularity="bucket")),
        (4, mean_of(QUANTIZED, "scatter_reduce", memory=False)),
        (4, mean_of(CHAIN, "hierarchical", 2)),
        (3, mean_of(QUANTIZED, "hierarchical", 3)),
        (3, mean_of(CHAIN, "sparse_reduce")),
        (4, mean_of(SPARSE, "sparse_reduce", granularity="bucket")),
        (4, tw.Mean(CHAIN, tw.MomentumCorrection(), exchange="hierarchical_sparse", workers_per_node=2)),
        (2, mean_of(tw.chain(SPARSE, tw.QSGD(bits=4), tw.codec.Huffman(), tw.codec.Rice()), "sparse_reduce")),
        (2, mean_of(tw.codec.Identity(), "hierarchical", 2)),
    ],
    ids=str,
)
def test_processes_and_threads_give_the_same_bits(size, averager):
    by_threads = tw.LocalWorld(size).run(run_steps, averager)
    for (results, saved), (expected, state) in zip(spawn(size, process_worker, averager), by_threads, strict=True):
        assert_equal(results, expected)
        assert_equal(results, by_threads[0][0])
        for kind in ("memory", "owner_memory"):
            assert (saved[kind] is None) == (state.state_dict()[kind] is None)
            assert_equal([leaves(saved[kind])], [leaves(state.state_dict()[kind])])


def ddp_worker(comm, averagers):
    torch.set_num_threads(1)
    return [train_with(comm, averager) for averager in averagers]


def train_with(comm, averager):
    """A few steps of training under DDP with small buckets; returns a fingerprint of the parameters and the memory."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(13, 31), nn.ReLU(), nn.Linear(31, 4)), bucket_cap_mb=0.001)
    handle = tw.compress_gradients(ddp, averager)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(5):
        generator = torch.Generator().manual_seed(100 * comm.rank + step)
        optimizer.zero_grad()
        ddp(torch.randn(8, 13, generator=generator)).square().mean().backward()
        optimizer.step()
    owned = handle.state_dict()[f"rank{comm.rank}"]["owner_memory"]
    handle.detach()
    flat = torch.cat([p.detach().reshape(-1) for p in ddp.parameters()])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest(), sorted(owned["residual"] if owned else {})


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ddp_replicas_stay_identical(size):
    nodes = 2 if size == 4 else size
    averagers = [mean_of(CHAIN, "scatter_reduce"), mean_of(CHAIN, "hierarchical", nodes)]
    averagers += [mean_of(CHAIN, "sparse_reduce"), mean_of(CHAIN, "hierarchical_sparse", nodes)]
    first, *others = spawn(size, ddp_worker, averagers)
    assert all(other == first for other in others)
    assert [owned for _, owned in first] == [["0.weight", "2.weight"], [], [], []]


@pytest.fixture
def declare(tmp_path, monkeypatch):
    """Declares entry points in the group of exchanges, as an installed package does, whose module has this code."""
    (tmp_path / "pairs_exchange.py").write_text(
        "from thinwire.average.mean.exchange.all_gather import AllGather\n"
        "class Gathered(AllGather):\n    word = 'gathered'\n"
        "    def num_bytes(self, size, workers_per_node, message):\n        return 0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    make = importlib.metadata.EntryPoint

    def declared(**values):
        found = [make(name, value, words.ENTRY_POINT_GROUP) for name, value in values.items()]
        monkeypatch.setattr(words, "declared", lambda group: {entry.name: entry for entry in found})

    words._declared.cache_clear()
    yield declared
    words._declared.cache_clear()


def test_an_exchange_of_an_installed_package_is_known_by_its_word(declare):
    declare(gathered="pairs_exchange:Gathered", missing="pairs_exchange:Missing", other="pairs_exchange:AllGather")

    def worker(comm, exchange):
        x = torch.full((8, 8), float(comm.rank))
        averager = tw.parse(f"Mean(QSGD(bits=4), exchange={exchange!r})")
        state = averager.init([("x", x)], comm)
        averager.step(state, [("x", x)], comm).wait()
        averager.commit(state)
        return x

    world = tw.LocalWorld(2)
    for ours, right in zip(world.run(worker, "gathered"), world.run(worker, "all_gather"), strict=True):
        assert torch.equal(ours, right)
    load = Load(tw.QSGD(bits=4), shapes=(torch.Size([64, 64]),), dense_numel=0, size=2)
    assert cheapest(load).word != "gathered", "auto must not depend on what was named before"
    for word, why in [("missing", "no attribute 'Missing'"), ("other", "with word = 'other'")]:
        with pytest.raises(ValueError, match=f"the entry point {word} = .* cannot be used: .*{why}"):
            tw.Mean(exchange=word)
    with pytest.raises(ValueError, match="must be one of auto, .*, gathered, missing, other, got 'unknown'"):
        tw.Mean(exchange="unknown")


def test_an_exchange_that_returns_no_finish_is_an_error_and_no_hang(monkeypatch):
    class Endless(type(EXCHANGES["all_gather"])):
        word = "endless"

        def begin(self, job):
            return None

    monkeypatch.setitem(EXCHANGES, "endless", Endless())

    def worker(comm):
        x = [("x", torch.ones(8, 8))]
        averager = tw.Mean(tw.QSGD(bits=4), exchange="endless")
        averager.step(averager.init(x, comm), x, comm)

    with pytest.raises(
        ValueError, match=r"rank \d: Endless.begin must return finish\(totals, dense_total\).*, got None"
    ):
        tw.LocalWorld(2).run(worker)


@pytest.mark.parametrize("size", [4, 8])
def test_scatter_reduce_means_16_bit_floats_whose_sum_overflows_with_the_bytes_of_an_all_reduce(size):
    def worker(comm, exchange):
        x = 6e4 - 1e3 * torch.rand(16, 16, generator=torch.Generator().manual_seed(comm.rank))
        averager, tensors = tw.Mean(tw.Cast("float16"), exchange=exchange), [("x", x.clone())]
        state, before = averager.init(tensors, comm), comm.ledger.bytes_sent
        averager.step(state, tensors, comm).wait()
        return x.double(), tensors[0][1].double(), comm.ledger.bytes_sent - before

    scattered, reduced = (tw.LocalWorld(size).run(worker, name) for name in ("scatter_reduce", "all_reduce"))
    mean = sum(x for x, _, _ in scattered) / size
    for (_, result, sent), (_, overflown, sent_by_ring) in zip(scattered, reduced, strict=True):
        # Rounded once by each worker and once by the owner, to 11 bits.
        torch.testing.assert_close(result, mean, rtol=2 * 2.0**-11, atol=0)
        assert overflown.isinf().all() and sent == sent_by_ring
