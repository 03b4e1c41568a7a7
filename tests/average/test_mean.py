"""The conformance suite of averagers: what every worker gets, what crosses the wire, and what goes wrong."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers.states import leaves

import thinwire as tw
from thinwire.average.base import copy_changed

AVERAGERS = [
    tw.Mean(),
    tw.Mean(tw.Cast(), tw.ErrorFeedback()),
    tw.Mean(tw.Cast(), exchange="all_gather"),
    tw.Mean(tw.TopK(0.1), tw.ErrorFeedback()),
    tw.Mean(tw.TopK(0.1), tw.ErrorFeedback(), granularity="bucket"),
    tw.Mean(tw.TopK(0.1), tw.ErrorFeedback(), min_ndim=0),
    tw.Mean(tw.QSGD(bits=4)),
    tw.Mean(tw.QSGD(bits=4), granularity="model"),
    tw.Mean(tw.ALQ(bucket_size=64)),
    tw.Mean(tw.chain(tw.TopK(0.1), tw.AMQ(bucket_size=64)), tw.ErrorFeedback()),
    tw.Mean(tw.codec.SignNorm(), tw.ErrorFeedback()),
    tw.Mean(tw.codec.SVD(rank=2), tw.ErrorFeedback()),
    tw.Mean(tw.codec.SVD(rank=2), granularity="bucket"),
    tw.Mean(tw.chain(tw.TopK(0.1), tw.QSGD(bits=4)), tw.ErrorFeedback()),
    tw.Mean(tw.Threshold(1.0), tw.ErrorFeedback()),
    tw.Mean(tw.TopK(0.1, sample=0.5), tw.ErrorFeedback(), granularity="bucket"),
    tw.Mean(tw.chain(tw.AdaptiveThreshold(), tw.QSGD(bits=4)), tw.ErrorFeedback(), exchange="all_gather"),
    tw.Mean(tw.Threshold(1.0), tw.ErrorFeedback(), exchange="scatter_reduce"),
    tw.Mean(tw.RandomK(0.1), tw.ErrorFeedback()),
    tw.Mean(tw.RandomK(0.1, shared=True, scaled=True)),
    tw.Mean(tw.RandomK(0.1, shared=True), tw.ErrorFeedback(), granularity="model", exchange="scatter_reduce"),
    tw.Mean(tw.RandomK(0.1, shared=True), tw.ErrorFeedback(), exchange="all_gather"),
    tw.Mean(tw.chain(tw.TopK(0.1), tw.QSGD(bits=4)), tw.ErrorFeedback(), exchange="hierarchical", workers_per_node=1),
    tw.Mean(tw.TopK(0.1), tw.ErrorFeedback(), exchange="scatter_reduce"),
    tw.Mean(tw.TopK(0.1), tw.ErrorFeedback(), granularity="bucket", exchange="scatter_reduce"),
    tw.Mean(tw.QSGD(bits=4), exchange="scatter_reduce"),
    tw.Mean(tw.TopK(0.1), tw.ErrorFeedback(), exchange="sparse_reduce"),
    tw.Mean(tw.chain(tw.TopK(0.1), tw.QSGD(bits=4)), tw.ErrorFeedback(), exchange="all_gather", divide_by="senders"),
    tw.Mean(
        tw.chain(tw.TopK(0.1), tw.QSGD(bits=4)), tw.ErrorFeedback(), granularity="bucket", exchange="sparse_reduce"
    ),
]
# Averagers with a path of their own; their files hold them to their definitions and formulas.
OTHERS = [
    tw.dgc(ratio=0.1, warmup_epochs=0),
    tw.Mean(tw.QSGD(bits=4), tw.MomentumCorrection(masking=False), exchange="scatter_reduce"),
    tw.PowerSGD(rank=1),
    tw.PowerSGD(rank=4),
    tw.PowerSGD(rank=2, memory=None),
    tw.ByName({"fc*": tw.Mean(tw.TopK(0.1), tw.ErrorFeedback()), "*": tw.Mean(tw.QSGD(bits=4), tw.ErrorFeedback())}),
    tw.ByName({"*.weight": tw.PowerSGD(rank=1), "*": tw.Mean()}),
]
every_gradient_averager = pytest.mark.parametrize("averager", [*AVERAGERS, *OTHERS], ids=repr)
every_averager = pytest.mark.parametrize("averager", AVERAGERS, ids=repr)
ENCODED_ONCE = [a for a in AVERAGERS if a.exchange not in ("scatter_reduce", "sparse_reduce")]
SHAPES = {"conv.weight": (8, 3, 3, 3), "conv.bias": (8,), "fc.weight": (10, 40), "scale": ()}


def gradients(rank, step):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return [(name, torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()]


def run_steps(comm, averager, num_steps=4):
    tensors = gradients(comm.rank, 0)
    state = averager.init(tensors, comm, seed=5)
    results = []
    for step in range(num_steps):
        tensors = gradients(comm.rank, step)
        averager.step(state, tensors, comm).wait()
        assert averager.commit(state)
        results.append([t for _, t in tensors])
    return results, state


def expected_mean(averager, size, num_steps):
    """The definition, tensor by tensor, without any communication: mean_i decode(encode(g_i + e_i))."""
    import zlib

    memories = [{name: torch.zeros(shape) for name, shape in SHAPES.items()} for _ in range(size)]
    for step in range(num_steps):
        total = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
        for rank in range(size):
            for name, g in gradients(rank, step):
                if g.ndim < averager.min_ndim and averager.codec != tw.codec.Identity():
                    total[name] += g.double() / size
                    continue
                x = g + memories[rank][name] if averager.memory else g
                own = 0 if averager.codec.traits.shared_key else rank << 32
                key = tw.codec.Key(5, zlib.crc32(name.encode()) | own, step)
                sent = averager.codec.decode(averager.codec.encode(x, key), x.shape, key)
                memories[rank][name] = x - sent
                total[name] += sent.double() / size
        yield total


@every_gradient_averager
@pytest.mark.parametrize("size", [2, 3])
def test_workers_agree_bit_for_bit(averager, size):
    everyone = tw.LocalWorld(size).run(lambda comm: run_steps(comm, averager)[0])
    for results in everyone[1:]:
        for mine, first in zip(results, everyone[0], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, first, strict=True))


@pytest.mark.parametrize(
    "averager", [a for a in ENCODED_ONCE if a.granularity == "layer" and a.divide_by == "workers"], ids=repr
)
@pytest.mark.parametrize("size", [1, 3])
def test_the_result_is_the_mean_of_what_each_sends(averager, size):
    results = tw.LocalWorld(size).run(lambda comm: run_steps(comm, averager)[0])[0]
    # A sum on the wire in bfloat16 rounds W - 1 times to 8 bits.
    loose = averager.codec == tw.Cast() and averager.exchange == "auto" and size > 1
    for step, total in enumerate(expected_mean(averager, size, 4)):
        for (name, _), result in zip(gradients(0, 0), results[step], strict=True):
            tolerance = 2.0**-6 if loose else 1e-6
            torch.testing.assert_close(result.double(), total[name], rtol=tolerance, atol=tolerance, msg=name)


@every_averager
def test_only_granularity_model_needs_everything_at_once(averager):
    """Stepping tensors one by one, as DDP's buckets do, gives the same result for granularity="layer".

    But for a sparse all-reduce: it gives the tensors of each call to owners of their own.
    """

    def worker(comm):
        state = averager.init(gradients(comm.rank, 0), comm, seed=5)
        tensors = gradients(comm.rank, 0)
        handles = [averager.step(state, [pair], comm) for pair in reversed(tensors)]
        for handle in handles:
            handle.wait()
        averager.commit(state)
        return [t for _, t in tensors]

    apart = tw.LocalWorld(3).run(worker)[0]
    if averager.granularity == "layer" and averager.exchange != "sparse_reduce":
        together = tw.LocalWorld(3).run(lambda comm: run_steps(comm, averager, 1)[0])[0][0]
        assert all(torch.equal(a, b) for a, b in zip(apart, together, strict=True))
    assert averager.traits.whole_model == (averager.granularity == "model")


def memories(saved):
    """The buffers of all memories in a saved state, of the children of a policy as well."""
    return {name.partition("memory.")[2]: value for name, value in leaves(saved).items() if "memory." in name}


@pytest.mark.parametrize(
    ("averager", "bad"),
    [*zip([*AVERAGERS, *OTHERS], itertools.cycle([float("inf"), float("nan")]), strict=False)],
    ids=repr,
)
def test_an_infinite_gradient_on_one_worker(averager, bad):
    """Every worker's result is not finite, memory is unchanged, and the next step is right."""

    def worker(comm, poison):
        tensors = gradients(comm.rank, 0)
        state = averager.init(tensors, comm, seed=5)
        results = []
        for step in range(3):
            tensors = gradients(comm.rank, step if step < 2 else 1)
            if step == 1:
                if not poison:
                    state.progress = tw.schedule.Progress(step=2)
                    continue
                if comm.rank == 2:
                    tensors[2][1][3, 7] = bad
            before = state.state_dict()
            averager.step(state, tensors, comm).wait()
            finite = averager.commit(state)
            if step == 1:
                assert not finite
                assert not all(torch.isfinite(t).all() for _, t in tensors)
                after = memories(state.state_dict())
                assert after.keys() == memories(before).keys()
                assert all(torch.equal(value, memories(before)[name]) for name, value in after.items())
            results.append([t for _, t in tensors])
        return results[-1]

    poisoned = tw.LocalWorld(4).run(worker, True)
    clean = tw.LocalWorld(4).run(worker, False)
    for got, expected in zip(poisoned, clean, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("averager", ENCODED_ONCE, ids=repr)
def test_the_ledger_holds_the_formula(averager):
    """2(W-1)/W (p + d) for a sum on the wire, (W-1)(p + d) for a gather, and nothing else during steps."""
    if not averager.codec.traits.fixed_size:
        pytest.skip("the formula of payloads whose size depends on the data is held in test_sparse.py")
    for size in (1, 2, 3, 4):

        def worker(comm):
            state = averager.init(gradients(comm.rank, 0), comm)
            before = comm.ledger.bytes_sent
            tensors = gradients(comm.rank, 0)
            averager.step(state, tensors, comm).wait()
            return comm.ledger.bytes_sent - before, comm.ledger.dense_fp32_bytes

        shapes = [torch.Size(shape) for shape in SHAPES.values()]
        dense = [s for s in shapes if len(s) < averager.min_ndim and averager.codec != tw.codec.Identity()]
        encoded = [s for s in shapes if s not in dense]
        if averager.granularity != "layer":
            encoded = [sum(s.numel() for s in encoded)]
        p, d = averager.codec.nbytes(encoded), 4 * sum(s.numel() for s in dense)
        summed = averager.codec.traits.summable and averager.exchange != "all_gather"
        expected = 2 * (size - 1) / size * (p + d) if summed else (size - 1) * (p + d)
        found = tw.LocalWorld(size).run(worker)
        assert sum(sent for sent, _ in found) == pytest.approx(size * expected, abs=1)
        for _, fp32 in found:
            assert fp32 == pytest.approx(2 * (size - 1) / size * 4 * 625, abs=1)


def test_half_precision_and_strided_tensors():
    def worker(comm):
        x = (torch.arange(12.0).view(3, 4) + comm.rank).to(torch.bfloat16)
        y = torch.arange(12.0, dtype=torch.float64).view(3, 4).t() + comm.rank
        averager = tw.Mean(tw.TopK(1.0), tw.ErrorFeedback())
        state = averager.init([("x", x), ("y", y)], comm)
        averager.step(state, [("x", x), ("y", y)], comm).wait()
        return x, y

    for x, y in tw.LocalWorld(2).run(worker):
        assert x.dtype == torch.bfloat16 and torch.equal(x.float(), torch.arange(12.0).view(3, 4) + 0.5)
        assert torch.equal(y, torch.arange(12.0, dtype=torch.float64).view(3, 4).t() + 0.5)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda rank, a, t: (tw.Mean(tw.TopK(0.2)) if rank == 2 else a, t), r"averager.*TopK\(ratio=0.2\).*rank 2"),
        (lambda rank, a, t: (a, [("w", torch.zeros(3, 5))] if rank == 1 else t), r"tensor 0.*\(3, 5\).*rank 1"),
        (lambda rank, a, t: (a, t[::-1] if rank == 3 else t), "tensor 0.*bias.*rank 3"),
        (lambda rank, a, t: (a, t[:1] if rank == 0 else t), "number of tensors"),
    ],
)
def test_different_workers_fail_together(change, message):
    def worker(comm):
        tensors = [("w", torch.zeros(3, 4)), ("bias", torch.zeros(3))]
        averager, tensors = change(comm.rank, tw.Mean(tw.TopK(0.1)), tensors)
        with pytest.raises(ValueError, match=message):
            averager.init(tensors, comm)
        return True

    assert tw.LocalWorld(4, timeout_seconds=60).run(worker) == [True] * 4


@pytest.mark.parametrize("granularity", ["layer", "bucket"])
@pytest.mark.parametrize(
    "codec",
    [
        tw.TopK(0.2),
        tw.chain(tw.TopK(0.2), tw.Cast()),
        tw.chain(tw.codec.Tiles(4), tw.TopK(0.2)),
        tw.codec.CoarseGrainedTopK(0.3, chunk=4),
        tw.QSGD(bits=4),
    ],
    ids=repr,
)
def test_a_sum_is_divided_by_those_that_sent_its_element(codec, granularity):
    """Each element is the mean over the workers whose decoding of it is not zero; of all where the codec sends all."""
    size = 4

    def run(comm):
        tensors = [(name, t.clone()) for name, t in gradients(comm.rank, 0)]
        averager = tw.Mean(codec, granularity=granularity, exchange="all_gather", min_ndim=0, divide_by=divide_by)
        state = averager.init(tensors, comm)
        averager.step(state, tensors, comm).wait()
        return torch.cat([t.reshape(-1) for _, t in tensors]), comm.ledger.bytes_sent

    found = {}
    for divide_by in ("workers", "senders"):
        found[divide_by] = tw.LocalWorld(size).run(run)
        assert all(torch.equal(result, found[divide_by][0][0]) for result, _ in found[divide_by])
    (mean, num_bytes), (of_senders, same_bytes) = found["workers"][0], found["senders"][0]
    assert num_bytes == same_bytes
    if codec == tw.QSGD(bits=4):
        assert torch.equal(mean, of_senders)
        return
    whole = [torch.cat([t.reshape(-1) for _, t in gradients(rank, 0)]) for rank in range(size)]
    one = [
        tw.LocalWorld(1).run(lambda comm, rank=rank: sent_alone(codec, granularity, comm, rank))[0]
        for rank in range(size)
    ]
    assert all(((part == x) | (part == 0) | (codec != tw.TopK(0.2))).all() for part, x in zip(one, whole, strict=True))
    num_senders = sum((part != 0).float() for part in one)
    torch.testing.assert_close(of_senders, sum(one) / num_senders.clamp(min=1), rtol=1e-5, atol=1e-6)
    assert num_senders.max() > num_senders[num_senders > 0].min()


def sent_alone(codec, granularity, comm, rank):
    """What worker `rank` sends, decoded."""
    tensors = [(name, t.clone()) for name, t in gradients(rank, 0)]
    averager = tw.Mean(codec, granularity=granularity, min_ndim=0)
    state = averager.init(tensors, comm)
    averager.step(state, tensors, comm).wait()
    return torch.cat([t.reshape(-1) for _, t in tensors])


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: tw.Mean(3), "codec must be a codec"),
        (lambda: tw.Mean(tw.TopK(0.1), tw.TopK(0.1)), "memory must be a memory"),
        (lambda: tw.Mean(granularity="tensor"), "granularity must be one of layer, bucket, model, got 'tensor'"),
        (lambda: tw.Mean(tw.TopK(0.1), exchange="all_reduce"), "cannot be added on the wire"),
        (lambda: tw.Mean(min_ndim=-1), "min_ndim must be an integer"),
        (lambda: tw.Mean(divide_by="all"), "divide_by must be one of workers, senders, got 'all'"),
        (
            lambda: tw.Mean(tw.TopK(0.1), divide_by="senders"),
            "divide_by='senders' needs exchange='all_gather', got 'auto'",
        ),
        (
            lambda: tw.Mean(tw.TopK(0.1), tw.memory.EF21(), exchange="all_gather", divide_by="senders"),
            "EF21.* needs the mean",
        ),
        (lambda: tw.Mean(tw.SignSGD(), exchange="all_gather", divide_by="senders"), "SignSGD.* needs the mean"),
    ],
)
def test_mistakes(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_results_of_several_types_are_copied_type_by_type(monkeypatch):
    """PyTorch before 2.11 writes all tensors of a call on a GPU as if they had the type of the first."""
    copy, calls = torch._foreach_copy_, []

    def noted(targets, sources):
        calls.append({t.dtype for t in targets})
        copy(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", noted)
    types = (torch.float64, torch.bfloat16, torch.float16, torch.bfloat16)
    targets = [torch.zeros(3, dtype=dtype) for dtype in types]
    assert copy_changed([torch.full((3,), 1.5 + i) for i in range(4)], targets)
    assert [t.tolist() for t in targets] == [[1.5 + i] * 3 for i in range(4)]
    assert sorted(map(str, calls)) == sorted(str({dtype}) for dtype in set(types))


def test_messages_of_dense_tensors_alone_are_merged_with_any_weights():
    def worker(comm):
        averager, x = tw.Mean(tw.QSGD(bits=4)), [("bias", torch.ones(3))]
        state, lone = averager.init(x, comm), averager.traits.lone_messages
        messages = []
        for value in (1.0, 5.0):
            messages.append(lone.make(state, [("bias", torch.full((3,), value))], comm))
            averager.discard(state)
        assert lone.merge(state, messages, [0.25, 0.75], x, comm)
        return x[0][1].tolist()

    assert tw.LocalWorld(1).run(worker) == [[4.0] * 3]
