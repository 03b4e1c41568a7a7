"""Momentum correction against its published definition in float64, and what it promises as a memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from helpers.states import leaves

import thinwire as tw
from thinwire import kernels
from thinwire.average.mean.clip import clip_gradients
from thinwire.comm.sums import Route
from thinwire.kernels.momentum import Buffers, Momentum
from thinwire.memory import MomentumCorrection

SHAPES = {"w": (6, 10), "v": (3, 5), "bias": (4,)}
FORMS = pytest.mark.parametrize("nesterov", [False, True], ids=["plain", "nesterov"])


# ---- the kernels ----


def buffers(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=generator) for _ in range(3)]


@FORMS
@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 4095, 4096, 100_003, 2**20 + 77])
@pytest.mark.parametrize("ratio", [0.001, 0.1, 1.0])
def test_one_pass_is_the_update_and_then_topk(n, ratio, nesterov):
    """The same bits as plain PyTorch, from both kernels, for sizes around blocks, samples and the cache."""
    (g, u, v), k = buffers(n), math.ceil(ratio * n)
    new = [torch.empty(n) for _ in range(6)]
    rule = Momentum(0.9, 0.5, nesterov)
    selected = kernels.momentum.correct_topk(Buffers([g], [u], [v], new[:1], new[1:2]), rule, [k])
    kernels.momentum.correct(Buffers([g], [u], [v], new[2:3], new[3:4]), rule)
    with kernels.use_backend("reference"):
        kernels.momentum.correct(Buffers([g], [u], [v], new[4:5], new[5:6]), rule)
        expected = kernels.select.topk(new[5:6], [k])
    for i in (0, 2):
        assert torch.equal(new[i], new[4])
        assert torch.equal(new[i + 1], new[5])
    assert all(torch.equal(a, b) for a, b in zip(selected, expected, strict=True))


@pytest.mark.parametrize(
    "change",
    [
        lambda g: g.zero_(),
        lambda g: g.fill_(2.0),
        lambda g: g[::1000].fill_(math.nan),
        lambda g: g[7000:].zero_(),
        lambda g: g[:50].fill_(1e30),
    ],
    ids=["all equal zero", "all equal", "nan", "the sample misses", "clustered"],
)
def test_one_pass_finds_exactly_the_largest_whatever_the_guess(change):
    n, zero = 20_000, torch.zeros(20_000)
    g, _, _ = buffers(n)
    change(g)
    new_u, new_v = torch.empty(n), torch.empty(n)
    indices, values = kernels.momentum.correct_topk(Buffers([g], [zero], [zero], [new_u], [new_v]), Momentum(0.9), [33])
    with kernels.use_backend("reference"):
        expected_indices, expected = kernels.select.topk([new_v], [33])
    assert torch.equal(indices, expected_indices)
    assert torch.equal(values.nan_to_num(5.0), expected.nan_to_num(5.0))


def test_many_segments_in_one_call():
    parts = [[t.clone() for t in b.split([5000, 1, 4999])] for b in buffers(10_000)]
    new_u, new_v = ([torch.empty_like(t) for t in parts[0]] for _ in range(2))
    indices, values = kernels.momentum.correct_topk(Buffers(*parts, new_u, new_v), Momentum(0.9), [5, 0, 7])
    expected_indices, expected = kernels.select.topk(new_v, [5, 0, 7])
    assert torch.equal(indices, expected_indices)
    assert torch.equal(values, expected)
    with pytest.raises(ValueError, match="new_us: expected the gradients' sizes"):
        kernels.momentum.correct(Buffers(*parts, new_u[::-1], new_v), Momentum(0.9))
    with pytest.raises(ValueError, match="vs: expected the gradients' sizes"):
        kernels.momentum.correct(Buffers(parts[0], parts[1], parts[2][:1], new_u, new_v), Momentum(0.9))


# ---- the published algorithm, in float64 ----


@dataclass
class Published:
    """One worker of Deep Gradient Compression, tensor by tensor."""

    memory: MomentumCorrection
    ratio: float

    def __post_init__(self):
        self.u = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
        self.v = {name: u.clone() for name, u in self.u.items()}

    def accumulate(self, name, g):
        m, u = self.memory.momentum, self.u[name]
        self.u[name] = m * (u + g) if self.memory.nesterov else m * u + g
        return self.u[name] + g if self.memory.nesterov else self.u[name]

    def sparse(self, name, g):
        v = self.v[name] + self.accumulate(name, g)
        k = math.ceil(self.ratio * v.numel())
        sent = torch.zeros_like(v, dtype=torch.bool).view(-1)
        sent[v.view(-1).abs().topk(k).indices] = True
        sent = sent.view(v.shape)
        self.v[name] = v.masked_fill(sent, 0)
        if self.memory.masking:
            self.u[name] = self.u[name].masked_fill(sent, 0)
        return torch.where(sent, v, 0)


def quadratic(rank, name):
    """f(x) = 1/2 sum a (x - c)^2, so the gradient is a (x - c)."""
    generator = torch.Generator().manual_seed(100 + rank)
    draw = {
        n: (torch.rand(s, generator=generator) + 0.5, torch.randn(s, generator=generator)) for n, s in SHAPES.items()
    }
    return draw[name]


def gradient(rank, name, x):
    a, c = quadratic(rank, name)
    return a.to(x.dtype) * (x - c.to(x.dtype))


def published_trajectory(memory, ratio, size, num_steps, lr):
    """Parameters after each step, by the definition: dense tensors are averaged first, then get momentum."""
    workers = [Published(memory, ratio) for _ in range(size)]
    x = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for _ in range(num_steps):
        for name in x:
            gs = [gradient(rank, name, x[name]) for rank in range(size)]
            if ratio < 1 and x[name].ndim >= 2:
                update = sum(w.sparse(name, g) for w, g in zip(workers, gs, strict=True)) / size
            else:
                update = workers[0].accumulate(name, sum(gs) / size)
            x[name] = x[name] - lr * update
        yield {name: value.clone() for name, value in x.items()}


def train(comm, averager, num_steps, lr, scales=(1.0,)):
    x = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    state, trajectory = averager.init(list(x.items()), comm), []
    for step in range(num_steps):
        scale = scales[step % len(scales)]
        tensors = [(name, gradient(comm.rank, name, value) * scale) for name, value in x.items()]
        parts = [tensors] if averager.traits.whole_model else [tensors[2:], tensors[:2]]
        for handle in [averager.step(state, part, comm, scale) for part in parts]:
            handle.wait()
        assert averager.commit(state)
        for name, update in tensors:
            x[name] = torch.add(x[name], update / scale, alpha=-lr)  # as PyTorch's SGD does
        trajectory.append({name: value.clone() for name, value in x.items()})
    return trajectory, leaves(state.state_dict()["memory"])


@FORMS
@pytest.mark.parametrize("masking", [True, False], ids=["masking", "no masking"])
@pytest.mark.parametrize(("size", "ratio"), [(1, 0.1), (3, 0.1), (4, 0.4), (3, 1.0)])
def test_the_trajectory_is_the_published_one(nesterov, masking, size, ratio):
    """On quadratics with several workers: no tolerance but float32 rounding over 25 steps."""
    memory = MomentumCorrection(0.8, nesterov, masking)
    averager = tw.Mean(tw.TopK(ratio), memory)
    by_rank = tw.LocalWorld(size).run(lambda comm: train(comm, averager, 25, 0.05)[0])
    for got, expected in zip(by_rank[0], published_trajectory(memory, ratio, size, 25, 0.05), strict=True):
        for name in SHAPES:
            torch.testing.assert_close(got[name].double(), expected[name], rtol=0, atol=2e-6, msg=name)
    assert all(torch.equal(by_rank[0][-1][n], other[-1][n]) for other in by_rank for n in SHAPES)


def momentum_sgd(size, nesterov, num_steps, lr):
    x = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    optimizer = torch.optim.SGD(x.values(), lr=lr, momentum=0.8, nesterov=nesterov, foreach=False)
    for _ in range(num_steps):
        for name, p in x.items():
            p.grad = sum(gradient(rank, name, p.detach()) for rank in range(size)) / size
        optimizer.step()
    return {name: p.detach() for name, p in x.items()}


@pytest.mark.parametrize("codec", [tw.TopK(1.0), tw.codec.Identity()], ids=repr)
@pytest.mark.parametrize("exchange", ["auto", "all_gather", "scatter_reduce"])
def test_a_lossless_codec_is_momentum_sgd(codec, exchange):
    """Bit for bit with one worker; with several to rounding, for the sums are in another order."""
    averager = tw.Mean(codec, MomentumCorrection(0.8), exchange=exchange)
    for size in (1, 3):
        result = tw.LocalWorld(size).run(lambda comm: train(comm, averager, 20, 0.05)[0][-1])[0]
        for name, expected in momentum_sgd(size, False, 20, 0.05).items():
            if size == 1:
                assert torch.equal(result[name], expected), name
            torch.testing.assert_close(result[name], expected, rtol=0, atol=1e-6)


def test_nesterov_at_ratio_1_is_nesterov_sgd():
    """To rounding: u = m (u + g) is m times PyTorch's buffer."""
    averager = tw.Mean(tw.TopK(1.0), MomentumCorrection(0.8, nesterov=True))
    result = tw.LocalWorld(2).run(lambda comm: train(comm, averager, 20, 0.05)[0][-1])[0]
    for name, expected in momentum_sgd(2, True, 20, 0.05).items():
        torch.testing.assert_close(result[name], expected, rtol=0, atol=1e-6)


def test_everything_sent_without_masking_is_momentum():
    """Through the encoded path, which `Mean` takes for no lossless codec: v = u, bit for bit."""
    memory, generator = MomentumCorrection(0.8, masking=False), torch.Generator().manual_seed(0)
    state, u = memory.init([("w", torch.zeros(50))]), torch.zeros(50)
    for _ in range(10):
        g = torch.randn(50, generator=generator)
        x = memory.compensate(state, "w", g)
        sent = tw.codec.Identity().decode(tw.codec.Identity().encode(x, residual=x), 50)
        memory.commit(state)
        u = u * 0.8 + g
        assert torch.equal(sent, u)


def test_without_momentum_and_masking_it_is_error_feedback():
    ours, theirs = (tw.Mean(tw.TopK(0.1), m) for m in (MomentumCorrection(0.0, masking=False), tw.ErrorFeedback()))
    a, b = (tw.LocalWorld(3).run(lambda comm, x=x: train(comm, x, 10, 0.05)) for x in (ours, theirs))
    for (mine, memory), (expected, residual) in zip(a, b, strict=True):
        assert all(torch.equal(mine[-1][n], expected[-1][n]) for n in SHAPES)
        assert all(torch.equal(memory[n.replace("residual", "velocity")], residual[n]) for n in residual)


# ---- what was sent ----


class Unfused(MomentumCorrection):
    """Momentum correction in separate passes."""

    def compensate_all(self, state, tensors, scale=1.0, counts=None):
        return super().compensate_all(state, tensors, scale)


class UnfusedFeedback(tw.ErrorFeedback):
    """Error feedback in separate passes."""

    def compensate_all(self, state, tensors, scale=1.0, counts=None):
        return super().compensate_all(state, tensors, scale)


PAIRS = [
    (MomentumCorrection(0.9), Unfused(0.9)),
    (MomentumCorrection(0.9, True), Unfused(0.9, True)),
    (tw.ErrorFeedback(), UnfusedFeedback()),
]


@pytest.mark.parametrize("memories", PAIRS, ids=["plain", "nesterov", "error feedback"])
@pytest.mark.parametrize("codec", [tw.TopK(0.1), tw.chain(tw.TopK(0.2), tw.QSGD(bits=4))], ids=repr)
def test_one_pass_or_several_are_the_same_bits(codec, memories):
    runs = []
    for memory in memories:
        averager = tw.Mean(codec, memory)
        runs.append(tw.LocalWorld(3).run(lambda comm, a=averager: train(comm, a, 8, 0.05)))
    for (a, memory_a), (b, memory_b) in zip(*runs, strict=True):
        assert all(torch.equal(a[-1][n], b[-1][n]) for n in SHAPES)
        assert all(torch.equal(memory_a[n], memory_b[n]) for n in memory_a)


SPARSE = [
    tw.TopK(0.1),
    tw.TopK(0.1, sample=0.5),
    tw.chain(tw.TopK(0.1), tw.QSGD(bits=4)),
    tw.RandomK(0.1),
    tw.codec.CoarseGrainedTopK(0.2, chunk=5),
    tw.Threshold(0.5),
]


@pytest.mark.parametrize("codec", SPARSE, ids=repr)
@pytest.mark.parametrize(
    "options", [{}, {"granularity": "bucket"}, {"exchange": "scatter_reduce"}], ids=["layer", "bucket", "scatter"]
)
def test_masking_zeroes_momentum_exactly_where_something_was_sent(codec, options):
    """After one step from zero v = u = g, so masked coordinates are those whose velocity changed by being sent."""

    def worker(comm, masking):
        averager = tw.Mean(codec, MomentumCorrection(masking=masking), **options)
        return train(comm, averager, 1, 0.05)[1]

    for masked, free in zip(*(tw.LocalWorld(2).run(worker, masking) for masking in (True, False)), strict=True):
        sent = 0
        for name in ("w", "v"):
            u, v, full = masked[f"momentum.{name}"], masked[f"velocity.{name}"], free[f"momentum.{name}"]
            assert torch.equal(free[f"velocity.{name}"], v)
            assert torch.equal(u == 0, v != full)
            assert torch.equal(u[u != 0], full[u != 0])
            sent += int((u == 0).sum())
        assert 0 < sent < 75


@pytest.mark.parametrize("codec", [tw.QSGD(bits=4), tw.codec.SignNorm(), tw.codec.SVD(rank=1), tw.Cast()], ids=repr)
@pytest.mark.parametrize("exchange", ["all_gather", "scatter_reduce"])
def test_codecs_that_send_everything_mask_everything(codec, exchange):
    averager = tw.Mean(codec, MomentumCorrection(), exchange=exchange)
    memory = tw.LocalWorld(2).run(lambda comm: train(comm, averager, 2, 0.05)[1])[1]
    assert not memory["momentum.w"].any()
    assert not memory["momentum.v"].any()
    assert memory["mean_momentum.bias"].any()
    assert memory["velocity.w"].any()


# ---- units, clipping, mistakes ----


@pytest.mark.parametrize("codec", [tw.TopK(0.1), tw.TopK(1.0), tw.QSGD(bits=4)], ids=repr)
@pytest.mark.parametrize(
    "clip",
    [None, tw.average.ClipByNorm(1.0), tw.average.ClipByValue(0.3), tw.average.ClipValueByGlobalNorm(0.2)],
    ids=repr,
)
def test_a_loss_scale_changes_nothing(codec, clip):
    averager = tw.Mean(codec, MomentumCorrection(), clip=clip)
    plain = tw.LocalWorld(2).run(lambda comm: train(comm, averager, 8, 0.05))
    scaled = tw.LocalWorld(2).run(lambda comm: train(comm, averager, 8, 0.05, (1024.0, 2.0, 65536.0)))
    for (a, memory_a), (b, memory_b) in zip(plain, scaled, strict=True):
        assert all(torch.equal(a[-1][n], b[-1][n]) for n in SHAPES)
        assert all(torch.equal(memory_a[n], memory_b[n]) for n in memory_a)


def test_a_bound_beyond_float32_clips_nothing():
    x = torch.tensor([3e38, -1.0, math.inf])
    assert torch.equal(tw.average.ClipByValue(1e308).apply(x, num_workers=4), x)
    assert torch.equal(tw.average.ClipValueByGlobalNorm().apply(x, num_workers=4, norm=1e39), x)


def test_clips_by_their_definition():
    g = torch.tensor([[3.0, -4.0], [12.0, 0.0]])
    torch.testing.assert_close(tw.average.ClipByNorm(6.5).apply(g, num_workers=4), g * 0.25)
    assert torch.equal(tw.average.ClipByNorm(27.0).apply(g, num_workers=4), g)
    assert torch.equal(tw.average.ClipByNorm(1.0).apply(torch.zeros(3), num_workers=4), torch.zeros(3))
    assert torch.equal(tw.average.ClipByValue(3.5).apply(g, num_workers=4), torch.tensor([[3.0, -3.5], [3.5, 0.0]]))
    for clip in (tw.average.ClipByNorm(1.0), tw.average.ClipByValue(1.0), tw.average.ClipValueByGlobalNorm()):
        for bad in (math.inf, math.nan):
            clipped = clip.apply(torch.tensor([1.0, bad]), num_workers=2, norm=bad)
            assert not clipped.isfinite().all(), "an infinite gradient must be seen by all workers"


def test_the_global_norm_is_that_of_all_workers():
    """Clipped at factor * sqrt(1/W sum |g_i|^2) of each tensor, seen in what goes into memory."""
    averager = tw.Mean(tw.TopK(0.01), MomentumCorrection(masking=False), clip=tw.average.ClipValueByGlobalNorm(0.1))
    assert averager.traits.whole_model
    memories = tw.LocalWorld(3).run(lambda comm: train(comm, averager, 1, 0.05)[1])
    for name in ("w", "v"):
        gs = [gradient(rank, name, torch.zeros(SHAPES[name])).view(-1) for rank in range(3)]
        bound = 0.1 * math.sqrt(sum(float((g.double() ** 2).sum()) for g in gs) / 3)
        for g, memory in zip(gs, memories, strict=True):
            torch.testing.assert_close(memory[f"momentum.{name}"], g.clamp(-bound, bound))


@pytest.mark.parametrize("magnitude", [1e-40, 1e-25, 1.0, 1e25, 1e36])
def test_the_global_norm_of_tiny_and_huge_gradients_is_that_of_float64(magnitude):
    clip = tw.average.ClipValueByGlobalNorm(0.1)

    def worker(comm):
        g = magnitude * torch.randn(40, generator=torch.Generator().manual_seed(comm.rank))
        ((_, clipped),) = clip_gradients(clip, [("g", g)], comm, scale=1.0)
        return g, clipped, comm.ledger.bytes_sent

    results = tw.LocalWorld(3).run(worker)
    bound = 0.1 * math.sqrt(sum(float(g.double().square().sum()) for g, _, _ in results) / 3)
    for rank, (g, clipped, sent) in enumerate(results):
        assert (g.abs() > bound).any() and sent == Route(rank, range(3)).traffic(torch.ones(1, dtype=torch.float64))[1]
        # One unit in the last place, which of numbers below the normal ones is 2^-149.
        torch.testing.assert_close(clipped.double(), g.double().clamp(-bound, bound), rtol=2.0**-23, atol=2.0**-149)


@pytest.mark.parametrize(
    "clip", [tw.average.ClipByValue(0.1), tw.average.ClipByNorm(0.2), tw.average.ClipValueByGlobalNorm(0.3)], ids=repr
)
def test_what_travels_dense_is_clipped_after_averaging(clip):
    averager = tw.Mean(tw.TopK(0.01), MomentumCorrection(), clip=clip)
    memories = tw.LocalWorld(3).run(lambda comm: train(comm, averager, 1, 0.05)[1])
    mean = sum(gradient(rank, "bias", torch.zeros(SHAPES["bias"])) for rank in range(3)) / 3
    expected = clip.apply(mean, 3, float(mean.norm()))
    assert not torch.allclose(expected, mean)
    for memory in memories:
        torch.testing.assert_close(memory["mean_momentum.bias"], expected)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: MomentumCorrection(momentum=1.0), "momentum must be at least 0 and below 1, got 1.0"),
        (lambda: tw.Mean(clip=1.0), "clip must be a clip such as ClipByNorm"),
        (lambda: tw.average.ClipByNorm(0), "ClipByNorm: max_norm must be above 0 and finite, got 0"),
        (lambda: tw.average.ClipByValue(-1.0), "ClipByValue: max_value must be above 0 and finite"),
        (lambda: tw.average.ClipValueByGlobalNorm("x"), "factor must be above 0 and finite, got 'x'"),
        (
            lambda: tw.Mean(tw.TopK(0.1), MomentumCorrection(), exchange="hierarchical"),
            "does not learn which coordinates its node sent",
        ),
    ],
)
def test_mistakes(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_it_is_data():
    memory = MomentumCorrection(0.8, nesterov=True)
    assert tw.parse(repr(memory)) == memory == replace(memory)
