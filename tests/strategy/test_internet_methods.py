"""SparseLoCo, DeMo, Dion, NoLoCo, MuLoCo and their parts: against float64 by-hand simulations, worker by worker."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from helpers.spawn import run_threads
from torch import nn

import thinwire as tw

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


def tiles_of(shape, tile):
    """Positions of the elements of each block of `tile^2`: whole tiles, then the rest in runs. Vectors in runs."""
    if len(shape) == 1:
        order = list(range(shape[0]))
    else:
        n, m = shape
        whole_n, whole_m = n // tile * tile, m // tile * tile
        regions = [
            (range(0, whole_n), range(0, whole_m)),
            (range(0, whole_n), range(whole_m, m)),
            (range(whole_n, n), range(0, whole_m)),
            (range(whole_n, n), range(whole_m, m)),
        ]
        order = []
        for rows, cols in regions:
            height, width = min(tile, len(rows)), min(tile, len(cols))
            for top in range(rows.start, rows.stop, max(1, height)):
                for left in range(cols.start, cols.stop, max(1, width)):
                    order += [i * m + j for i in range(top, top + height) for j in range(left, left + width)]
    return [order[i : i + tile * tile] for i in range(0, len(order), tile * tile)]


def top_of(values, ratio):
    kept = sorted(range(len(values)), key=lambda i: -abs(values[i]))[: max(1, math.ceil(ratio * len(values) - 1e-9))]
    return sorted(kept)


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
    flat, sent = m.reshape(-1).numpy(), np.zeros(m.numel())
    kept = sorted(block[i] for block in tiles_of(m.shape, tile) for i in top_of([flat[j] for j in block], ratio))
    order = [j for block in tiles_of(m.shape, tile) for j in block]
    kept.sort(key=order.index)  # values travel in the order of the tiles
    sent[kept] = two_bits(flat[kept])
    return torch.from_numpy(sent).view(m.shape)


def test_sparse_loco_is_its_simulation():
    """m <- 0.9 m + Delta; send C(m); m <- m - C(m); theta <- theta - mean C(m)."""
    size, every, rounds, tile, ratio, decay = 3, 4, 5, 4, 0.2, 0.9
    parts = tw.sparse_loco(every=every, ratio=ratio, decay=decay, tile=tile)
    results = run_threads(
        size, train, lambda m, o, comm: tw.local_updates(m, o, comm=comm, **parts), every * rounds, 0.05
    )
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
        anchors = [a - sum(c[part] for c in sent) / size for part, a in enumerate(anchors)]
    assert close(results, [anchors] * size)


def dct(n):
    k, i = np.arange(n)[:, None], np.arange(n)[None]
    basis = np.cos(math.pi * (i + 0.5) * k / n) * math.sqrt(2 / n)
    basis[0] /= math.sqrt(2)
    return basis


def test_demo_is_its_simulation():
    """On whole tiles of 2 x 2: the largest frequency of each, and the sign of the mean; vectors in runs of 2."""
    size, steps, decay, lr = 2, 6, 0.9, 0.01
    results = run_threads(size, train_every_step, tw.demo(frequencies=1, tile=2, decay=decay), steps, lr)
    xs = [start(part).double() for part in range(len(SHAPES))]
    momentum = [[torch.zeros_like(x) for x in xs] for _ in range(size)]
    for _ in range(steps):
        sums = [torch.zeros_like(x) for x in xs]
        for rank in range(size):
            for part, x in enumerate(xs):
                m = decay * momentum[rank][part] + gradient(x, rank, part)
                c = demo_by_hand(m)
                sums[part] += c
                momentum[rank][part] = m - c
        xs = [
            x - lr * torch.sign(torch.where(total.abs() < 1e-9, 0.0, total)) for x, total in zip(xs, sums, strict=True)
        ]
    assert close([x for x, _ in results], [xs] * size)


def demo_by_hand(m):
    """DCT by tiles; of each block of four coordinates the largest; back."""
    out = torch.zeros_like(m)
    if m.ndim == 1:
        pieces = [dct(min(2, len(m) - i)) @ m[i : i + 2].numpy() for i in range(0, len(m), 2)]
        y = np.concatenate(pieces)
        kept = keep_largest(y, 4)
        return torch.cat([torch.from_numpy(dct(min(2, len(m) - i)).T @ kept[i : i + 2]) for i in range(0, len(m), 2)])
    for i in range(0, m.shape[0], 2):
        for j in range(0, m.shape[1], 2):
            y = dct(2) @ m[i : i + 2, j : j + 2].numpy() @ dct(2).T
            kept = keep_largest(y.reshape(-1), 4).reshape(2, 2)
            out[i : i + 2, j : j + 2] = torch.from_numpy(dct(2).T @ kept @ dct(2))
    return out


def keep_largest(y, block):
    kept = np.zeros_like(y)
    for i in range(0, len(y), block):
        best = i + int(np.argmax(np.abs(y[i : i + block])))
        kept[best] = y[best]
    return kept


def test_transforms_are_orthonormal_and_reorder_by_tiles():
    x = torch.randn(70, 131, generator=torch.Generator().manual_seed(1))
    for transform in (tw.Tiles(64), tw.DCT(64)):
        y = transform.forward(x)
        assert torch.allclose(transform.inverse(y, x.shape), x, rtol=0, atol=1e-5)
        assert y.double().norm().item() == pytest.approx(x.double().norm().item(), rel=1e-6)
    order = torch.tensor([j for block in tiles_of((70, 131), 64) for j in block])
    assert torch.equal(tw.Tiles(64).forward(x), x.reshape(-1)[order])
    tile = torch.from_numpy(dct(64) @ x[:64, :64].double().numpy() @ dct(64).T).float()
    assert torch.allclose(tw.DCT(64).forward(x)[:4096].view(64, 64), tile, rtol=0, atol=1e-5)


def test_bin_means_and_floats_of_four_bits_by_hand():
    x = torch.randn(100, generator=torch.Generator().manual_seed(2))
    codec = tw.BinMeans(bits=2, bucket_size=50)
    expected = np.concatenate([two_bits(part.double().numpy()) for part in x.split(50)])
    assert np.allclose(codec.decode(codec.encode(x), 100).numpy(), expected, rtol=1e-6)
    assert codec.nbytes(100) == 2 * 4 * 4 + 25
    exact = torch.tensor([-1.0, -0.25, 0.0, 2**-6, 0.5]) * 3
    assert torch.equal(tw.Float4().decode(tw.Float4().encode(exact), 5), exact)
    exact = torch.tensor([6.0, -4.0, 3.0, 2.0, -1.5, 1.0, 0.5, 0.0])
    assert torch.allclose(tw.Float4("e2m1").decode(tw.Float4("e2m1").encode(exact), 8), exact, rtol=1e-6)


# ---- decay, pairs ----


@pytest.mark.parametrize("codec", [tw.TopK(0.3), tw.BlockwiseTopK(0.3, block=10)], ids=["fused", "plain"])
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
        return sent, own, state.state_dict()["memory"]["x"].double()

    results = run_threads(2, worker)
    for sent, own, memory in results:
        assert torch.allclose(0.9 * own, memory, rtol=0, atol=1e-5)
        for step, (_, mean) in enumerate(sent):
            assert torch.allclose(sum(other[step][0] for other, _, _ in results) / 2, mean, rtol=0, atol=1e-5)


def test_random_pairs_meet_everybody_and_keep_the_mean():
    topology = tw.RandomPairs(seed=1)
    for size in (4, 7):
        met = {(rank, peer) for step in range(64) for rank in range(size) for peer in topology.row(rank, step, size)}
        assert len(met) == size * size
        assert all(len(topology.row(rank, step, size)) <= 2 for step in range(64) for rank in range(size))
    assert tw.RandomPairs(seed=2).matrix(0, 8).tolist() != topology.matrix(0, 8).tolist()


# ---- Dion ----


def test_dion_is_its_simulation():
    size, steps, rank, mu, lr = 3, 5, 2, 0.9, 0.05
    averager = tw.Dion(rank, mu)
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
        averager, x = tw.Dion(rank=1), torch.zeros(8, 9)
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
        averager = tw.Dion(rank=2)
        xs = [("w", torch.randn(30, 20)), ("b", torch.randn(7))]
        state = averager.init(xs, comm)
        before = comm.ledger.snapshot()
        averager.step(state, xs, comm).wait()
        return comm.ledger.since(before).bytes_sent

    assert sum(run_threads(4, worker)) == 2 * 3 * 4 * (2 * (30 + 20) + 7)


# ---- compositions ----


def sgd_alone(steps, lr):
    x = [start(part) for part in range(len(SHAPES))]
    for _ in range(steps):
        for part, p in enumerate(x):
            p.sub_(gradient(p, 0, part), alpha=lr)
    return [[p.double() for p in x]]


@pytest.mark.parametrize(
    "parts",
    [
        tw.diloco(every=1, lr=1.0, momentum=0.0),
        tw.streaming_diloco(every=1, fragments=2, delay=0, alpha=0.0, lr=1.0, momentum=0.0, format=None),
        tw.sparse_loco(every=1, ratio=1.0, bits=8, tile=4),  # all elements, each in a bin of its own
        tw.no_loco(every=1, lr=1.0, momentum=0.0),
        tw.mulo_co(every=1, bits=None, lr=1.0, momentum=0.0),
    ],
    ids=["diloco", "streaming_diloco", "sparse_loco", "no_loco", "mulo_co"],
)
def test_every_method_alone_and_lossless_is_sgd(parts):
    """H = 1, plain SGD inside and outside, one worker."""
    results = run_threads(1, train, lambda m, o, comm: tw.local_updates(m, o, comm=comm, **parts), 10, 0.05)
    assert close(results, sgd_alone(10, 0.05), atol=1e-5)


def muon_step(x, g, buffer, lr, decay):
    """Muon with Nesterov momentum 0.95, five Newton-Schulz steps, in bfloat16 as PyTorch's."""
    buffer.lerp_(g, 0.05)
    update = g.lerp(buffer, 0.95).bfloat16()
    wide = update.t() if update.shape[0] > update.shape[1] else update
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = wide @ wide.t()
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315), wide, beta=3.4445)
    update = wide.t() if update.shape[0] > update.shape[1] else wide
    return x * (1 - lr * decay) - lr * 0.2 * math.sqrt(max(x.shape)) * update.float()


def test_muon_and_adamw_are_one_optimizer_and_resume():
    def steps(model, optimizer, numbers):
        for _ in numbers:
            for part, p in enumerate(model.parts):
                p.grad = gradient(p.detach(), 0, part)
            optimizer.step()

    whole, first, second = Bowl(), Bowl(), Bowl()
    made = [tw.MuonAdamW(model.parameters(), lr=0.02) for model in (whole, first, second)]
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
