"""SparseLoCo, DeMo, Dion, NoLoCo, MuLoCo and their parts: against float64 by-hand simulations, worker by worker."""

from __future__ import annotations

import copy
import math
import pickle
import re

import numpy as np
import pytest
import torch
from helpers.ledgers import ledger_of_round
from helpers.spawn import run_threads
from torch import nn

import thinwire as tw
from thinwire.lab.train.models import GPT
from thinwire.lab.train.optimize import Muon

SHAPES = ((6, 8), (5,))


class Bowl(nn.Module):
    """The loss of worker i is 1/2 |D_i (x - t_i)|^2 with a diagonal D_i, so that its gradient is known in float64."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ParameterList([start(i) for i in range(len(SHAPES))])


def start(part):
    return torch.randn(SHAPES[part], generator=torch.Generator().manual_seed(part))


def gradient(x, rank, part):
    generator = torch.Generator().manual_seed(100 + 10 * rank + part)
    target = torch.randn(SHAPES[part], generator=generator, dtype=torch.float64)
    scale = torch.rand(SHAPES[part], generator=generator, dtype=torch.float64) + 0.5
    return (scale * (x.double() - target)).to(x.dtype)


def train(comm, attach, steps, lr):
    model = Bowl()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    attach(model, optimizer, comm)
    for _ in range(steps):
        for part, p in enumerate(model.parts):
            p.grad = gradient(p.detach(), comm.rank, part)
        optimizer.step()
    return [p.detach().double() for p in model.parts]


def train_every_step(comm, averager, steps, lr):
    """Gradients are averaged without hooks, as `compress_gradients` does."""
    xs = [(str(i), start(i)) for i in range(len(SHAPES))]
    state = averager.init(xs, comm)
    for _ in range(steps):
        grads = [(name, gradient(x, comm.rank, i)) for i, (name, x) in enumerate(xs)]
        averager.step(state, grads, comm).wait()
        assert averager.commit(state)
        for (_, x), (_, g) in zip(xs, grads, strict=True):
            x.sub_(g, alpha=lr)
    return [x.double() for _, x in xs], copy.deepcopy(state.state_dict())


def close(results, expected, atol=1e-5):
    """Whether every worker has its expected parameters."""
    return all(
        torch.allclose(x, y, rtol=0, atol=atol)
        for result, wanted in zip(results, expected, strict=True)
        for x, y in zip(result, wanted, strict=True)
    )


# ---- sparse codecs by hand ----


def divisor(n, limit):
    return max(d for d in range(1, limit + 1) if n % d == 0)


def tiles_of(shape, tile):
    """Positions of the elements of each tile: dimensions are cut by their largest divisors up to `tile`."""
    n, m = shape if len(shape) == 2 else (1, *shape)
    height, width = divisor(n, tile), divisor(m, tile)
    return [
        [i * m + j for i in range(top, top + height) for j in range(left, left + width)]
        for top in range(0, n, height)
        for left in range(0, m, width)
    ]


def top_of(values, count):
    return sorted(sorted(range(len(values)), key=lambda i: -abs(values[i]))[:count])


def two_bits(values):
    """Bins of sign, each split at its mean; every value becomes the mean of its bin."""
    values, out = np.asarray(values), np.zeros(len(values))
    for sign in (values >= 0, values < 0):
        if not sign.any():
            continue
        threshold = np.float32(values[sign].mean())
        for part in (sign & (values >= threshold), sign & (values < threshold)):
            if part.any():
                out[part] = values[part].mean()
    return out


def compress_by_hand(m, tile, ratio):
    flat, sent, count = m.reshape(-1).numpy(), np.zeros(m.numel()), math.ceil(ratio * tile * tile)
    # Values travel in the order of the tiles.
    kept = [block[i] for block in tiles_of(m.shape, tile) for i in top_of([flat[j] for j in block], count)]
    sent[kept] = two_bits(flat[kept])
    return torch.from_numpy(sent).view(m.shape)


def test_sparse_loco_is_its_simulation():
    """m <- 0.9 m + Delta; send C(m); m <- m - C(m); theta <- theta - mean of C(m) over those that sent the coordinate."""
    size, every, rounds, tile, ratio, decay = 3, 4, 5, 4, 0.2, 0.9
    strategy = tw.sparse_loco(every=every, ratio=ratio, decay=decay, tile=tile)
    results = run_threads(size, train, lambda m, o, comm: tw.attach(m, o, strategy, comm=comm), every * rounds, 0.05)
    anchors = [start(part).double() for part in range(len(SHAPES))]
    memory = [[torch.zeros_like(a) for a in anchors] for _ in range(size)]
    for _ in range(rounds):
        sent = []
        for rank in range(size):
            x = [a.clone() for a in anchors]
            for _ in range(every):
                x = [p - 0.05 * gradient(p, rank, part) for part, p in enumerate(x)]
            memory[rank] = [decay * m + a - p for m, a, p in zip(memory[rank], anchors, x, strict=True)]
            sent.append([compress_by_hand(m, tile, ratio) for m in memory[rank]])
            memory[rank] = [m - c for m, c in zip(memory[rank], sent[rank], strict=True)]
        anchors = [a - mean_of_senders([c[part] for c in sent]) for part, a in enumerate(anchors)]
    assert close(results, [anchors] * size)


def mean_of_senders(sent):
    """Of each coordinate, over the workers that sent it, as released code does; what is sent is never exactly zero."""
    num_senders = sum((c != 0).double() for c in sent)
    return sum(sent) / num_senders.clamp(min=1)


def dct(n):
    k, i = np.arange(n)[:, None], np.arange(n)[None]
    basis = np.cos(math.pi * (i + 0.5) * k / n) * math.sqrt(2 / n)
    basis[0] /= math.sqrt(2)
    return basis


def test_demo_is_its_simulation():
    """The two largest frequencies of each tile, 3 x 4 and 5, and the sign of the mean over those that sent each."""
    size, steps, decay, lr = 3, 6, 0.9, 0.01
    results = run_threads(
        size, train_every_step, tw.strategy.demo(frequencies=2, tile=5, decay=decay).averager, steps, lr
    )
    xs = demo_by_hand(size, [lr] * steps, decay, tile=5, count=2)
    assert close([x for x, _ in results], [xs] * size)


def test_demo_with_a_falling_rate_is_its_simulation():
    """The released code adds up rate times gradient: here the loss is multiplied by the rate of the step."""
    size, decay, rates = 3, 0.9, [0.02, 0.02, 0.01, 0.004, 0.004, 0.001, 0.001, 0.0005]

    def worker(comm, in_loss):
        model = Bowl()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        tw.attach(model, optimizer, tw.strategy.demo(frequencies=2, tile=5, decay=decay), comm=comm)
        for rate in rates:
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            loss = sum((p * gradient(p.detach(), comm.rank, i)).sum() for i, p in enumerate(model.parts))
            (loss * rate if in_loss else loss).backward()
            optimizer.step()
        return [p.detach().double() for p in model.parts]

    expected = [demo_by_hand(size, rates, decay, tile=5, count=2)] * size
    assert close(run_threads(size, worker, True), expected)
    assert not close(run_threads(size, worker, False), expected), "the rate makes no difference"


def demo_by_hand(size, rates, decay, tile, count):
    """DeMo's released code in float64: the momentum of each worker adds up rate times gradient."""
    xs = [start(part).double() for part in range(len(SHAPES))]
    momentum = [[torch.zeros_like(x) for x in xs] for _ in range(size)]
    for rate in rates:
        sent = [[] for _ in xs]
        for rank in range(size):
            for part, x in enumerate(xs):
                m = decay * momentum[rank][part] + rate * gradient(x, rank, part)
                y = frequencies_by_hand(m, tile)
                kept = torch.zeros(y.numel(), dtype=torch.float64)
                for block in tiles_of(y.shape, tile):
                    largest = [block[i] for i in top_of(y.reshape(-1)[block].tolist(), count)]
                    kept[largest] = y.reshape(-1)[largest]
                sent[part].append(kept.view(y.shape))
                momentum[rank][part] = m - frequencies_by_hand(sent[part][-1], tile, inverse=True)
        means = [frequencies_by_hand(mean_of_senders(ys), tile, inverse=True) for ys in sent]
        xs = [x - rate * torch.sign(torch.where(m.abs() < 1e-9, 0.0, m)) for x, m in zip(xs, means, strict=True)]
    return xs


def frequencies_by_hand(x, tile, inverse=False):
    """Each tile between the cosine bases of its height and width."""
    matrix = x.view(-1, x.shape[-1]).numpy()
    height, width = (divisor(n, tile) for n in matrix.shape)
    left, right = (dct(n).T if inverse else dct(n) for n in (height, width))
    out = np.zeros_like(matrix)
    for i in range(0, matrix.shape[0], height):
        for j in range(0, matrix.shape[1], width):
            out[i : i + height, j : j + width] = left @ matrix[i : i + height, j : j + width] @ right.T
    return torch.from_numpy(out).view(x.shape)


def test_transforms_are_orthonormal_and_reorder_by_tiles():
    x = torch.randn(70, 131, generator=torch.Generator().manual_seed(1))
    for transform in (tw.codec.Tiles(64), tw.codec.DCT(64)):
        y = transform.forward(x)
        assert torch.allclose(transform.inverse(y, x.shape), x, rtol=0, atol=1e-5)
        assert y.double().norm().item() == pytest.approx(x.double().norm().item(), rel=1e-6)
    whole, right, lower, corner = x[:64, :128], x[:64, 128:], x[64:, :128], x[64:, 128:]
    by_tiles = [whole[:, :64], whole[:, 64:], right, lower[:, :64], lower[:, 64:], corner]
    assert torch.equal(tw.codec.Tiles(64).forward(x), torch.cat([tile.reshape(-1) for tile in by_tiles]))
    tile = torch.from_numpy(dct(64) @ x[:64, :64].double().numpy() @ dct(64).T).float()
    assert (tw.codec.DCT(64).forward(x)[:4096].view(64, 64) - tile).norm() < 2e-7 * tile.norm()


@pytest.mark.parametrize(
    ("shape", "tile", "values"),
    [((100, 130), (50, 26), 640), ((64, 128), (64, 64), 128), ((71, 3), (1, 3), 213), ((192,), (1, 64), 192)]
    + [((130,), (1, 26), 130), ((), (1, 1), 1), ((0, 5), (1, 1), 0), ((128, 3, 3), (64, 9), 128)],
)
def test_tiles_of_divisors_send_as_many_values_as_whole_ones(shape, tile, values):
    """As DeMo's and Templar's released code: 640 values of a 100 x 130 matrix, where tiles of 4096 send 204."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    codec = tw.chain(tw.codec.Tiles(divisors=True), tw.codec.BlockwiseTopK(64 / 4096))
    decoded = codec.decode(codec.encode(x), x.shape)
    assert int(decoded.count_nonzero()) == values
    matrix, (height, width) = (x.reshape(len(x) if x.ndim > 1 else 1, -1) if x.numel() else x), tile
    kept = decoded.view(matrix.shape)
    for i in range(0, matrix.shape[0], height):
        for j in range(0, matrix.shape[1] if x.numel() else 0, width):
            block, sent = matrix[i : i + height, j : j + width], kept[i : i + height, j : j + width]
            count = min(64, height * width)
            assert torch.equal(sent.reshape(-1).abs().topk(count).values, block.reshape(-1).abs().topk(count).values)
    edges = tw.chain(tw.codec.Tiles(), tw.codec.BlockwiseTopK(64 / 4096))
    assert shape != (100, 130) or int(edges.decode(edges.encode(x), x.shape).count_nonzero()) == 204


@pytest.mark.parametrize("transform", [tw.codec.Tiles(divisors=True), tw.codec.DCT(divisors=True)], ids=repr)
def test_payloads_of_tiles_of_divisors_are_those_of_their_groups(transform):
    """Segments with tiles of 50 x 26, of 64 and of 26 x 50 elements: the first and the last are one group."""
    xs = [torch.randn(s, generator=torch.Generator().manual_seed(4)) for s in ((100, 130), (192,), (130, 100))]
    codec = tw.chain(transform, tw.codec.BlockwiseTopK(32 / 4096), tw.codec.BinMeans())
    ys = [transform.forward(x) for x in xs]
    large, small = (tw.chain(tw.codec.BlockwiseTopK(32 / c, block=c), tw.codec.BinMeans()) for c in (1300, 64))
    residuals = [torch.empty_like(x) for x in xs]
    payload = codec.encode(xs, [tw.codec.Key()] * 3, residuals)
    assert torch.equal(payload, torch.cat([large.encode([ys[0], ys[2]], [tw.codec.Key()] * 2), small.encode(ys[1])]))
    decoded = codec.decode(payload, [x.shape for x in xs])
    assert all(torch.equal(x - y, r) for x, y, r in zip(xs, decoded, residuals, strict=True))
    assert payload.numel() == codec.nbytes([x.shape for x in xs])


def test_tiles_of_divisors_refuse_what_they_cannot_send():
    with pytest.raises(ValueError, match="vary in size"):
        tw.chain(tw.codec.Tiles(divisors=True), tw.Threshold(0.1))
    with pytest.raises(ValueError, match="block must be an integer from 1 to 4096, got 16384"):
        tw.chain(tw.codec.DCT(128, divisors=True), tw.codec.BlockwiseTopK(0.01))


@pytest.mark.parametrize(
    ("averager", "values", "value_bytes"),
    [(tw.strategy.demo().averager, (10 * 32, 3 * 32), lambda k: 4 * k)]
    + [(tw.sparse_loco().averager, (10 * 82, 192), lambda k: 16 + k // 4)],
    ids=["demo", "sparse_loco"],
)
def test_bytes_of_the_released_rules(averager, values, value_bytes):
    """Ten tiles of 50 x 26, and a vector of three times 64: half of it in DeMo, and all of it in SparseLoCo."""

    def worker(comm):
        xs = [("w", torch.randn(100, 130)), ("b", torch.randn(192))]
        return ledger_of_round(comm, averager, xs).bytes_sent

    indices = [min(-(-11 * values[0] // 8), tw.kernels.indices.nbytes(values[0], 13_000))]
    indices += [0 if values[1] == 192 else min(-(-6 * values[1] // 8), tw.kernels.indices.nbytes(values[1], 192))]
    assert run_threads(3, worker) == [2 * (sum(map(value_bytes, values)) + sum(indices))] * 3


def test_bin_means_and_floats_of_four_bits_by_hand():
    x = torch.randn(100, generator=torch.Generator().manual_seed(2))
    codec = tw.codec.BinMeans(bits=2, bucket_size=50)
    expected = np.concatenate([two_bits(part.double().numpy()) for part in x.split(50)])
    assert np.allclose(codec.decode(codec.encode(x), 100).numpy(), expected, rtol=1e-6)
    assert codec.nbytes(100) == 2 * 4 * 4 + 25
    exact = torch.tensor([-1.0, -0.25, 0.0, 2**-6, 0.5]) * 3
    assert torch.equal(tw.codec.Float4().decode(tw.codec.Float4().encode(exact), 5), exact)
    exact = torch.tensor([6.0, -4.0, 3.0, 2.0, -1.5, 1.0, 0.5, 0.0])
    assert torch.allclose(tw.codec.Float4("e2m1").decode(tw.codec.Float4("e2m1").encode(exact), 8), exact, rtol=1e-6)


# ---- decay, pairs ----


@pytest.mark.parametrize("codec", [tw.TopK(0.3), tw.codec.BlockwiseTopK(0.3, block=10)], ids=["fused", "plain"])
def test_decayed_memory_is_its_simulation(codec):
    def worker(comm):
        averager = tw.Mean(codec, tw.ErrorFeedback(decay=0.9), exchange="all_gather")
        g = torch.zeros(4, 10)
        state, own, sent = averager.init([("x", g)], comm), torch.zeros(40, dtype=torch.float64), []
        for step in range(6):
            g.normal_(generator=torch.Generator().manual_seed(10 * step + comm.rank))
            own = 0.9 * own + g.reshape(-1).double()
            mine = codec.decode(codec.encode(own.float()), 40).double()
            own = own - mine
            averager.step(state, [("x", g)], comm).wait()
            averager.commit(state)
            sent.append((mine, g.reshape(-1).double()))
        return sent, own, state.state_dict()["memory"]["residual"]["x"].double()

    results = run_threads(2, worker)
    for sent, own, memory in results:
        assert torch.allclose(0.9 * own, memory, rtol=0, atol=1e-5)
        for step, (_, mean) in enumerate(sent):
            assert torch.allclose(sum(other[step][0] for other, _, _ in results) / 2, mean, rtol=0, atol=1e-5)


def test_random_pairs_meet_everybody_and_keep_the_mean():
    topology = tw.topology.RandomPairs(seed=1)
    for size in (4, 7):
        met = {(rank, peer) for step in range(64) for rank in range(size) for peer in topology.row(rank, step, size)}
        assert len(met) == size * size
        assert all(len(topology.row(rank, step, size)) <= 2 for step in range(64) for rank in range(size))
    assert tw.topology.RandomPairs(seed=2).matrix(0, 8).tolist() != topology.matrix(0, 8).tolist()


# ---- Dion ----


def test_dion_is_its_simulation():
    size, steps, rank, mu, lr = 3, 5, 2, 0.9, 0.05
    averager = tw.average.Dion(rank, mu)
    fresh = tw.LocalWorld(1).run(lambda comm: averager.init([("0", start(0))], comm).q["0"])[0]
    results = run_threads(size, train_every_step, averager, steps, lr)
    q = fresh.double().t()
    assert torch.allclose(q.norm(dim=0), torch.ones(rank, dtype=torch.float64), atol=1e-6)
    x, vector = start(0).double(), start(1).double()
    momentum = [torch.zeros_like(x) for _ in range(size)]
    for _ in range(steps):
        bs = [m + gradient(x, i, 0) for i, m in enumerate(momentum)]
        p = torch.linalg.qr(sum(b @ q for b in bs) / size).Q
        r = sum(b.t() @ p for b in bs) / size
        momentum = [b - (1 - mu) * p @ r.t() for b in bs]
        q = r / r.norm(dim=0)
        x = x - lr * math.sqrt(6 / 8) * p @ q.t()
        vector = vector - lr * sum(gradient(vector, i, 1) for i in range(size)) / size
    assert close([result for result, _ in results], [[x, vector]] * size)
    for (_, state), m in zip(results, momentum, strict=True):
        assert torch.allclose(state["momentum"]["0"].double(), m, rtol=0, atol=1e-5)


def test_dion_loses_nothing_of_an_infinite_or_zero_gradient():
    def worker(comm):
        averager, x = tw.average.Dion(rank=1), torch.zeros(8, 9)
        state = averager.init([("x", x)], comm)
        averager.step(state, [("x", x)], comm).wait()
        assert averager.commit(state)
        zero, before = x.clone(), state.state_dict()
        x.fill_(1.0)[3, 3] = math.inf if comm.rank else 1.0
        averager.step(state, [("x", x)], comm).wait()
        after = averager.commit(state), state.state_dict()
        same = all(torch.equal(before[k]["x"], after[1][k]["x"]) for k in ("momentum", "q"))
        return zero.abs().max().item(), bool(x.isfinite().all()), after[0], same

    assert run_threads(2, worker) == [(0.0, False, False, True)] * 2


def test_dion_sends_what_it_says():
    def worker(comm):
        xs = [("w", torch.randn(30, 20)), ("b", torch.randn(7))]
        return ledger_of_round(comm, tw.average.Dion(rank=2), xs).bytes_sent

    assert sum(run_threads(4, worker)) == 2 * 3 * 4 * (2 * (30 + 20) + 7)


# ---- compositions ----


def sgd_alone(steps, lr):
    x = [start(part) for part in range(len(SHAPES))]
    for _ in range(steps):
        for part, p in enumerate(x):
            p.sub_(gradient(p, 0, part), alpha=lr)
    return [[p.double() for p in x]]


@pytest.mark.parametrize(
    "strategy",
    [
        tw.diloco(every=1, lr=1.0, momentum=0.0),
        tw.streaming_diloco(every=1, fragments=2, delay=0, alpha=0.0, lr=1.0, momentum=0.0, format=None),
        tw.sparse_loco(every=1, ratio=1.0, bits=8, tile=4),  # all elements, each in a bin of its own
        tw.strategy.no_loco(every=1, lr=1.0, momentum=0.0),
        tw.mulo_co(every=1, bits=None, lr=1.0, momentum=0.0),
    ],
    ids=["diloco", "streaming_diloco", "sparse_loco", "no_loco", "mulo_co"],
)
def test_every_method_alone_and_lossless_is_sgd(strategy):
    """H = 1, plain SGD inside and outside, one worker."""
    results = run_threads(1, train, lambda m, o, comm: tw.attach(m, o, strategy, comm=comm), 10, 0.05)
    assert close(results, sgd_alone(10, 0.05), atol=1e-5)


def muon_step(x, g, buffer, lr, decay):
    """Muon with momentum 0.9, five Newton-Schulz steps, in bfloat16 as PyTorch's."""
    buffer.lerp_(g, 0.1)
    update = buffer.bfloat16()
    wide = update.t() if update.shape[0] > update.shape[1] else update
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = wide @ wide.t()
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315), wide, beta=3.4445)
    update = wide.t() if update.shape[0] > update.shape[1] else wide
    return x * (1 - lr * decay) - lr * math.sqrt(x.shape[0] / x.shape[1]) * update.float()


def test_outer_rates_are_those_of_the_methods_configurations():
    """MuLoCo: 0.9 and 0.8, with 2 bits 0.8 and 0.9; NoLoCo's gamma is its outer rate, so the pull is gamma / lr = 1."""
    assert tw.mulo_co(bits=None).outer == tw.OuterSGD(lr=0.9, momentum=0.8)
    assert tw.mulo_co().outer == tw.OuterSGD(lr=0.8, momentum=0.9)
    assert tw.mulo_co().averager.memory == tw.ErrorFeedback(decay=0.9)
    assert (tw.strategy.no_loco().outer.lr, tw.strategy.no_loco().pull) == (0.7, 1.0)


def test_embeddings_take_adamw():
    """Of the GPT's recipe: the embedding, to which the output layer is tied, has AdamW's state, other matrices Muon's."""
    model = GPT(layers=1, width=8, heads=2, context=4).build(num_classes=5)
    optimizer = Muon().build(model)
    model(torch.zeros(2, 3, dtype=torch.int64)).sum().backward()
    optimizer.step()
    kinds = {name: "momentum_buffer" in optimizer.state[p] for name, p in model.named_parameters()}
    assert not kinds["tokens.weight"] and not kinds["positions.weight"]
    assert kinds["layers.layers.0.linear1.weight"] and kinds["layers.layers.0.self_attn.in_proj_weight"]


def test_muon_and_adamw_are_one_optimizer_and_resume():
    def steps(model, optimizer, numbers):
        for _ in numbers:
            for part, p in enumerate(model.parts):
                p.grad = gradient(p.detach(), 0, part)
            optimizer.step()

    whole, first, second = Bowl(), Bowl(), Bowl()
    made = [
        tw.strategy.MuonAdamW(model.parameters(), lr=0.02, weight_decay=0.1, betas=(0.9, 0.95))
        for model in (whole, first, second)
    ]
    steps(whole, made[0], range(6))
    steps(first, made[1], range(3))
    second.load_state_dict(first.state_dict())
    made[2].load_state_dict(copy.deepcopy(made[1].state_dict()))
    steps(second, made[2], range(3))
    assert all(torch.equal(a, b) for a, b in zip(whole.parts, second.parts, strict=True))

    by_hand, buffer = start(0), torch.zeros(SHAPES[0])
    vector = nn.Parameter(start(1))
    adamw = torch.optim.AdamW([vector], lr=0.02, weight_decay=0.0, betas=(0.9, 0.95), eps=1e-8)
    for _ in range(6):
        by_hand = muon_step(by_hand, gradient(by_hand, 0, 0), buffer, 0.02, 0.1)
        vector.grad = gradient(vector.detach(), 0, 1)
        adamw.step()
    assert torch.allclose(whole.parts[0], by_hand, rtol=0, atol=2e-3)  # bfloat16 has 8 bits
    assert torch.equal(whole.parts[1], vector)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_a_copy_of_muon_and_adamw_steps_alike_and_alone(copied):
    model = nn.Linear(4, 3)
    optimizer = tw.strategy.MuonAdamW(model.parameters(), lr=0.1)

    def step(model, optimizer):
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    before = step(model, optimizer)
    other, others_optimizer = copied((model, optimizer))
    after = step(other, others_optimizer)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert all(torch.equal(p, q) for p, q in zip(step(model, optimizer), after, strict=True))


def test_muon_and_adamw_refuse_what_they_would_divide_wrongly():
    model = nn.Linear(4, 3)
    for params, kind in ((model.named_parameters(), "tuple"), ([{"params": model.parameters()}], "dict")):
        with pytest.raises(ValueError, match=rf"params must be parameters, as of model.parameters\(\), got a {kind}"):
            tw.strategy.MuonAdamW(params)
    with pytest.raises(ValueError, match="takes no other group of parameters; give it all parameters when you make it"):
        tw.strategy.MuonAdamW(model.parameters()).add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})
    for undecayed in (("vectors", "*linear1*"), ("norms",), ()):
        wrong = re.escape(f"undecayed: Muon decays all its matrices and nothing else, got {undecayed}")
        with pytest.raises(ValueError, match=wrong):
            Muon(undecayed=undecayed)


@pytest.mark.parametrize("scale", ["spectral", "rms"])
def test_muon_leaves_matrices_without_elements_alone(scale):
    model = nn.ParameterList([torch.empty(3, 0), torch.empty(0, 3), torch.ones(2, 2)])
    sum(p.square().sum() for p in model).backward()
    tw.strategy.MuonAdamW(model.parameters(), lr=0.1, scale=scale).step()
    assert (model[2] < 1).all()


@pytest.mark.parametrize(
    ("scale", "factor"), [("spectral", lambda n, m: (n / m) ** 0.5), ("rms", lambda n, m: 0.2 * max(n, m) ** 0.5)]
)
@pytest.mark.parametrize("shape", [(3, 12), (12, 3), (6, 6)])
def test_muons_update_has_its_scale_and_decay_the_unadjusted_rate(scale, factor, shape):
    """Against float64: orth(b) is U V' with singular values of 0.7 to 1.2, as five Newton-Schulz steps leave them. A scheduler
    changes the rate of both."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(shape))
    optimizer = tw.strategy.MuonAdamW([p], lr=0.05, weight_decay=0.3, scale=scale)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    momentum = torch.zeros(shape, dtype=torch.float64)
    for step in range(3):
        before, p.grad = p.detach().double(), torch.randn(shape)
        momentum = 0.9 * momentum + 0.1 * p.grad.double()
        u, _, v = torch.linalg.svd(momentum, full_matrices=False)
        optimizer.step()
        lr = 0.05 * 0.5**step
        update = (before * (1 - lr * 0.3) - p.detach().double()) / (lr * factor(*shape))
        in_basis = u.T @ update @ v.T
        assert ((0.6 < in_basis.diagonal()) & (in_basis.diagonal() < 1.3)).all(), in_basis
        assert torch.allclose(in_basis, torch.diag(in_basis.diagonal()), rtol=0, atol=0.05), in_basis
        assert torch.allclose(u @ in_basis @ v, update, rtol=0, atol=0.02)
        scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.05 / 8]
    before, p.grad = p.detach().double(), torch.zeros(shape)
    optimizer.state[p]["momentum_buffer"].zero_()
    optimizer.step()
    assert torch.allclose(p.detach().double(), before * (1 - 0.05 / 8 * 0.3), rtol=3e-7, atol=0)
