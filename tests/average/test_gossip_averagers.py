"""Gossip averagers: properties and bytes of all, and each held to a float64 simulation in matrix form."""

from __future__ import annotations

import math
import zlib

import numpy as np
import pytest
import torch
from helpers.averagers import GOSSIP as AVERAGERS
from helpers.cases import case
from helpers.spawn import spawn

import thinwire as tw
from thinwire import kernels
from thinwire.average.gossip.nodes import pack_weighted, unpack_weighted

RING = tw.Ring()
every_averager = pytest.mark.parametrize("averager", AVERAGERS, ids=repr)
SHAPES = {"conv.weight": (4, 3, 3, 3), "conv.bias": (4,), "fc.weight": (10, 12), "scale": ()}


def start(rank, offset=0.0):
    generator = torch.Generator().manual_seed(1000 + rank)
    return [(name, torch.randn(shape, generator=generator) + offset * rank) for name, shape in SHAPES.items()]


def flat(tensors):
    return torch.cat([t.double().reshape(-1) for _, t in tensors])


def run_rounds(comm, averager, rounds, tensors=None, state=None):
    tensors = start(comm.rank) if tensors is None else tensors
    state = averager.init(tensors, comm, seed=3) if state is None else state
    for _ in range(rounds):
        averager.step(state, tensors, comm).wait()
        averager.commit(state)
    return tensors, state


def estimates(averager, size, rounds, values=start):
    """Each worker's estimate of the mean after some rounds, (W, n) in float64."""

    def worker(comm):
        tensors, state = run_rounds(comm, averager, rounds, values(comm.rank))
        return flat(tensors) * averager.debias_factor(state)

    return torch.stack(tw.LocalWorld(size).run(worker))


def starts(size, values=start):
    return torch.stack([flat(values(rank)) for rank in range(size)])


@pytest.mark.parametrize("offset", range(9))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weighted_messages_may_start_at_any_address(offset, dtype):
    message = pack_weighted(0.25, torch.tensor([1.0, -2.0, 3.0], dtype=dtype))
    received = torch.cat([torch.zeros(offset, dtype=torch.uint8), message])[offset:]
    weight, x = unpack_weighted(received, dtype)
    assert weight == 0.25 and x.dtype == dtype and x.tolist() == [1.0, -2.0, 3.0]


# ---- what all of them do; `thinwire.testing.check_averager` checks the contract ----


@every_averager
def test_disagreement_shrinks_and_the_mean_is_kept(averager):
    x = starts(4)
    z = estimates(averager, 4, 20)
    assert (z - z.mean(0)).square().sum() < 0.6 * (x - x.mean(0)).square().sum()
    torch.testing.assert_close(z.mean(0), x.mean(0), rtol=0, atol=2e-5)


@every_averager
def test_nothing_moves_once_workers_agree(averager):
    z = estimates(averager, 4, 5, lambda rank: start(0))
    # DeepSqueeze and Moniqua send the values themselves; workers' own random numbers differ in the former.
    if isinstance(averager, tw.DeepSqueeze):
        assert (z - z.mean(0)).abs().max() < 0.5
    else:
        torch.testing.assert_close(z, starts(4, lambda rank: start(0)), rtol=0, atol=1e-6)


def test_workers_that_differ_fail_together():
    averager, other = tw.Mix(), tw.Mix(tw.Complete())

    def worker(comm):
        with pytest.raises(ValueError, match=r"averager.*Mix\(Complete\(\)\).*rank 2"):
            (other if comm.rank == 2 else averager).init(start(comm.rank), comm)
        return True

    assert all(tw.LocalWorld(4, timeout_seconds=60).run(worker))


@every_averager
def test_one_message_per_neighbour_and_half_step(averager):
    def worker(comm):
        tensors, state = run_rounds(comm, averager, 1)
        before = comm.ledger.snapshot()
        run_rounds(comm, averager, 1, tensors, state)
        return comm.ledger.since(before)

    ledgers = tw.LocalWorld(8).run(worker)
    n, rounds = sum(math.prod(shape) for shape in SHAPES.values()), getattr(averager, "iterations", 1)
    for rank, ledger in enumerate(ledgers):
        messages, num_bytes = expected_traffic(averager, rank, n)
        assert ledger.messages == messages * rounds
        assert ledger.bytes_sent == num_bytes
        assert ledger.dense_numel == n


def expected_traffic(averager, rank, n):
    """Messages and bytes that a worker sends in the second round, by the documented formulas."""
    topology, size, up, down = averager.topology, 8, 0, 0
    if isinstance(topology, tw.topology.Hierarchical):
        up, down = int(rank % 2 == 1), int(rank % 2 == 0)
        topology, rank, size = topology.inner, rank // 2, 4
    peers = 0 if up else len(topology.neighbours(rank, 1, size).sends)
    shapes = [torch.Size(shape) for shape in SHAPES.values()]
    payload = {
        tw.Mix: lambda a: 4 * n,
        tw.average.ClippedGossip: lambda a: 4 * n,
        tw.PushSum: lambda a: 4 * n + 8,
        tw.Choco: lambda a: a.codec.nbytes(shapes) + 8 * (a.step_size is None),
        tw.DeepSqueeze: lambda a: a.codec.nbytes(shapes) + 8 * (a.step_size is None),
        tw.Moniqua: lambda a: 4 + math.ceil(a.bits * (n + 1) / 8) + 20 * (a.step_size is None),
        tw.PowerGossip: power_gossip_bytes,
    }[type(averager)](averager)
    return peers + up + down, peers * payload + up * 4 * n + down * (4 * n + 8)


def power_gossip_bytes(averager):
    sides = [(math.prod(shape[1:]), shape[0]) for shape in SHAPES.values() if len(shape) > 1]  # even: m, odd: n
    half_steps = range(averager.iterations, 2 * averager.iterations)
    matrices = sum(4 * averager.rank * side[k % 2] for k in half_steps for side in sides)
    return matrices + 4 * sum(math.prod(shape) for shape in SHAPES.values() if len(shape) < 2)


@every_averager
def test_after_a_non_finite_value_restored_parameters_go_on(averager):
    def worker(comm):
        tensors, state = run_rounds(comm, averager, 1)
        finite = []
        for bad in (float("nan"), float("inf")):
            if comm.rank == 1:
                tensors[2][1][0, 0] = bad
            averager.step(state, tensors, comm).wait()
            finite.append(averager.commit(state))
            tensors = start(comm.rank)
        run_rounds(comm, averager, 20, tensors, state)
        return finite, flat(tensors) * averager.debias_factor(state)

    results = tw.LocalWorld(4).run(worker)
    assert results[1][0] == [False, False]
    z = torch.stack([result for _, result in results])
    x = starts(4)
    assert (z - x.mean(0)).square().sum() < 0.6 * (x - x.mean(0)).square().sum()


def with_all_averagers(comm):
    results = []
    for averager in AVERAGERS:
        before = comm.ledger.bytes_sent
        tensors, state = run_rounds(comm, averager, 4)
        results.append((flat(tensors), comm.ledger.bytes_sent - before, state.weight))
    return results


def test_real_processes_get_what_threads_get():
    for ours, threads in zip(spawn(4, with_all_averagers), tw.LocalWorld(4).run(with_all_averagers), strict=True):
        for averager, mine, thread in zip(AVERAGERS, ours, threads, strict=True):
            with case(averager):
                assert torch.equal(mine[0], thread[0])
                assert mine[1:] == thread[1:]


# ---- the definitions, in float64 and matrix form ----


@pytest.mark.parametrize(
    "topology",
    [RING, tw.Exponential(), tw.topology.Linear(), tw.topology.Star(), tw.topology.BipartiteExponential()],
    ids=repr,
)
def test_mix_is_a_product_of_mixing_matrices(topology):
    x = starts(8)
    for step in range(7):
        x = torch.from_numpy(topology.matrix(step, 8)) @ x
    torch.testing.assert_close(estimates(tw.Mix(topology), 8, 7), x, rtol=0, atol=1e-5)


DIRECTED = tw.topology.DirectedGraph(((0, 1), (1, 2), (2, 0), (0, 2), (2, 3), (3, 0)))


@pytest.mark.parametrize(
    ("topology", "size"),
    [
        (DIRECTED, 4),
        (tw.topology.Star(weights="uniform"), 5),
        (tw.topology.DirectedRing(), 6),
        (tw.Exponential(peers=2), 8),
        (tw.topology.Phases(((0, tw.topology.DirectedRing()), (3, tw.topology.Star(weights="uniform")))), 6),
    ],
    ids=repr,
)
def test_push_sum_on_directed_and_time_varying_graphs(topology, size):
    def worker(comm, rounds):
        tensors, state = run_rounds(comm, tw.PushSum(topology), rounds)
        return flat(tensors), state.weight

    x, w = starts(size), torch.ones(size, dtype=torch.float64)
    for step in range(6):
        p = torch.from_numpy(topology.matrix(step, size))
        x, w = p @ x, p @ w
    results = tw.LocalWorld(size).run(worker, 6)
    torch.testing.assert_close(torch.stack([r[0] for r in results]), x, rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.tensor([r[1] for r in results], dtype=torch.float64), w, rtol=0, atol=1e-12)

    results = tw.LocalWorld(size).run(worker, 150)
    assert sum(weight for _, weight in results) == pytest.approx(size, abs=1e-9)
    for biased, weight in results:
        torch.testing.assert_close(biased / weight, starts(size).mean(0), rtol=0, atol=2e-5)


def roundtrip(codec, flat_x, rank, step):
    """What neighbours decode of a flat vector, segment by segment."""
    parts = flat_x.float().split([math.prod(shape) for shape in SHAPES.values()])
    parts = [part.view(shape) for part, shape in zip(parts, SHAPES.values(), strict=True)]
    keys = [tw.codec.Key(3, zlib.crc32(name.encode()) | rank << 32, step) for name in SHAPES]
    payload = codec.encode(parts, keys)
    return torch.cat(codec.decode(payload, [part.numel() for part in parts])).double()


@pytest.mark.parametrize("codec", [tw.TopK(0.1), tw.QSGD(bits=4), tw.codec.SignNorm(), tw.codec.Identity()], ids=repr)
def test_choco_and_deepsqueeze_follow_their_definitions(codec):
    size, step_size = 5, 0.3
    p = torch.from_numpy(RING.matrix(0, size))
    x = y = starts(size)
    h, d = torch.zeros_like(x), torch.zeros_like(x)
    for step in range(3):
        h = h + torch.stack([roundtrip(codec, (x - h)[rank], rank, step) for rank in range(size)])
        x = x + step_size * (p @ h - h)
        v = y + d
        c = torch.stack([roundtrip(codec, v[rank], rank, step) for rank in range(size)])
        d, y = v - c, y + step_size * (p @ c - c)
    # A number that float32 rounds across a quantizer's level moves by a step; such are few.
    for averager, expected in ((tw.Choco(RING, codec, step_size), x), (tw.DeepSqueeze(RING, codec, step_size), y)):
        error = (estimates(averager, size, 3) - expected).abs()
        assert (error > 1e-4).double().mean() < 0.01


def test_choco_and_deepsqueeze_with_identity_are_mix():
    mixed = estimates(tw.Mix(), 6, 10)
    for averager in (
        tw.Choco(RING, tw.codec.Identity(), step_size=1.0),
        tw.DeepSqueeze(RING, tw.codec.Identity(), step_size=1.0),
    ):
        torch.testing.assert_close(estimates(averager, 6, 10), mixed, rtol=0, atol=1e-5)


def test_choco_starts_its_copies_at_equal_parameters():
    def worker(comm, offset):
        tensors = [("x", torch.arange(5.0) + offset * comm.rank)]
        return tw.Choco(RING).init(tensors, comm).memory.public

    assert torch.equal(tw.LocalWorld(3).run(worker, 0.0)[1], torch.arange(5.0))
    assert torch.equal(tw.LocalWorld(3).run(worker, 1.0)[1], torch.zeros(5))


def square(rank):
    return [("w", torch.randn(6, 6, generator=torch.Generator().manual_seed(rank))), ("b", torch.randn(3) * 0 + rank)]


@pytest.mark.parametrize("options", [{}, {"warm_start": False}, {"warm_start": False, "shared_p": True}], ids=repr)
@pytest.mark.parametrize("topology", [RING, tw.topology.Torus(), tw.Complete(), tw.topology.Star()], ids=repr)
def test_power_gossip_at_full_rank_is_mix(topology, options):
    full = tw.PowerGossip(topology, rank=6, **options)
    torch.testing.assert_close(
        estimates(full, 6, 4, square), estimates(tw.Mix(topology), 6, 4, square), rtol=0, atol=2e-5
    )


def test_power_gossip_is_exact_where_p_lies_on_the_smaller_side():
    def wide(rank):
        return [("w", torch.randn(3, 9, generator=torch.Generator().manual_seed(rank)))]

    even = estimates(tw.PowerGossip(RING, rank=8), 4, 1, wide)
    torch.testing.assert_close(even, estimates(tw.Mix(), 4, 1, wide), rtol=0, atol=1e-5)


def reference_power_gossip(x, p_of, half_steps, sign, step_size):
    """Rank r on every edge of a ring, in float64; x is (W, n, m), p_of(edge, k) the fresh direction of half step k."""
    size, weights, warm = len(x), RING.matrix(0, len(x)), {}
    for k in range(half_steps):
        moved = x.clone()
        for i in range(size):
            for j in range(i + 1, size):
                if weights[i, j] == 0:
                    continue
                p = warm.get((i, j), p_of(i, j, k))
                p = torch.where(p < 0, -1.0, 1.0).double() / len(p) ** 0.5 if sign else torch.linalg.qr(p)[0]
                difference = (x[i] - x[j]) if k % 2 == 0 else (x[i] - x[j]).t()
                q = difference.t() @ p
                approximation = p @ q.t() if k % 2 == 0 else q @ p.t()
                warm[i, j] = q
                moved[i] -= step_size * weights[i, j] * approximation
                moved[j] += step_size * weights[i, j] * approximation
        x = moved
    return x


@pytest.mark.parametrize(
    ("rank", "iterations", "sign", "step_size"),
    [(1, 1, False, 1.0), (1, 3, False, 1.0), (2, 2, False, 0.5), (1, 2, True, 1.0)],
)
def test_power_gossip_follows_its_definition(rank, iterations, sign, step_size):
    def values(worker):
        return [("w", torch.randn(7, 5, generator=torch.Generator().manual_seed(worker)))]

    def fresh(i, j, k):
        side = 7 if k % 2 == 0 else 5
        key = kernels.mix_key(3, zlib.crc32(b"w") | (1 + i * 5 + j) << 32, k)
        return (2 * kernels.uniform(key, side * rank).double() - 1).view(rank, side).t()

    averager = tw.PowerGossip(RING, rank=rank, iterations=iterations, sign_p=sign, step_size=step_size)
    expected = reference_power_gossip(starts(5, values).view(5, 7, 5), fresh, 6, sign, step_size)
    measured = estimates(averager, 5, 6 // iterations, values).view(5, 7, 5)
    torch.testing.assert_close(measured, expected, rtol=0, atol=1e-4)


def test_power_gossip_escapes_a_direction_without_difference():
    """The difference vanishes, then comes back: a zero q must not stay the direction for ever."""

    def worker(comm):
        averager, tensors = tw.PowerGossip(tw.Complete()), [("w", torch.zeros(4, 5))]
        state = averager.init(tensors, comm)
        run_rounds(comm, averager, 3, tensors, state)
        tensors[0][1][3, 4] = float(comm.rank)
        return run_rounds(comm, averager, 6, tensors, state)[0][0][1][3, 4].item()

    assert tw.LocalWorld(2).run(worker) == pytest.approx([0.5, 0.5], abs=1e-5)


# ---- Moniqua ----


def moniqua_payload(averager, x, key):
    payload = torch.empty(kernels.modular.nbytes(len(x), averager.bits), dtype=torch.uint8)
    kernels.modular.encode([x], payload, key, averager.bits, averager.modulus)
    return payload


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_moniqua_recovers_differences_within_theta(bits, offset):
    averager = tw.Moniqua(theta=0.5, bits=bits)
    generator = torch.Generator().manual_seed(bits)
    x = torch.randn(5000, generator=generator) * 3 + offset
    y = x + (torch.rand(5000, generator=generator) * 2 - 1) * 0.499
    y_sent = kernels.modular.decode(moniqua_payload(averager, y, 7), 5000, bits)
    recovered = x + kernels.modular.wrap(y_sent - x, averager.modulus)
    delta = 1 / (2**bits - 1)
    bound = delta * averager.modulus + 1e-3 * (offset > 0) + 1e-5
    assert (recovered - y).abs().max() <= bound
    assert averager.modulus == pytest.approx(2 * 0.5 / (1 - 2 * delta))


def test_moniqua_is_unbiased():
    averager, x = tw.Moniqua(theta=1.0), torch.linspace(-2, 2, 101)
    wrapped = kernels.modular.wrap(x, averager.modulus)
    codes = [moniqua_payload(averager, x, key) for key in range(4000)]
    decoded = torch.stack([kernels.modular.decode(code, 101, averager.bits) for code in codes])
    # A rounding error of at most a step, 2, has a deviation of at most 1.
    assert (decoded.mean(0) - wrapped).abs().max() < 5 / 4000**0.5


def test_moniqua_follows_its_definition():
    size, theta, gamma = 5, 8.0, 0.2
    p, x, modulus = RING.matrix(0, size), starts(size).numpy(), 6 * theta
    n = x.shape[1]
    for step in range(3):
        u = kernels.uniform(kernels.mix_key(3, 0, step), n).double().numpy()
        wrapped = (x + modulus / 2) % modulus - modulus / 2
        codes = np.floor((wrapped / (modulus / 2) * 3 + 3) / 2 + u).clip(0, 3)
        sent = (2 * codes - 3) * modulus / 6
        own = x + sent - wrapped
        change = np.zeros_like(x)
        for i in range(size):
            for j in range(size):
                theirs = x[i] + (sent[j] - x[i] + modulus / 2) % modulus - modulus / 2
                change[i] += gamma * p[i, j] * (theirs - own[i]) if i != j else 0.0
        x = x + change
    error = np.abs(estimates(tw.Moniqua(theta=theta, step_size=gamma), size, 3).numpy() - x)
    assert (error > 1e-4).mean() < 0.01


# ---- rates ----


def test_the_one_peer_exponential_graph_reaches_the_mean_exactly():
    for size in (2, 4, 8, 16, 32):

        def worker(comm):
            tensors = [("x", torch.tensor([float(2**10 * comm.rank**2 % 4096)]))]  # sums are exact in float32
            return run_rounds(comm, tw.Mix(tw.Exponential()), int(math.log2(comm.size)), tensors)[0][0][1].item()

        mean = sum(float(2**10 * rank**2 % 4096) for rank in range(size)) / size
        assert tw.LocalWorld(size).run(worker) == [mean] * size


@pytest.mark.parametrize(
    "topology", [RING, tw.topology.Torus(), tw.Complete(), tw.Exponential(static=True), tw.Exponential()], ids=repr
)
@pytest.mark.parametrize("size", [4, 9, 16, 64])
def test_contraction_agrees_with_the_spectral_gap(topology, size):
    """From the slowest mode of P, disagreement shrinks by exactly 1 - gap a period; from any start by no less."""
    period, gap = topology.period(size), topology.spectral_gap(size)
    matrix = np.eye(size)
    for step in range(period):
        matrix = topology.matrix(step, size) @ matrix
    if not np.allclose(matrix, matrix.T):  # circulant, hence normal: real parts of its modes span an invariant plane
        values, vectors = np.linalg.eig(matrix)
    else:
        values, vectors = np.linalg.eigh(matrix)
    mode = vectors[:, np.argsort(-np.abs(values))[1]]
    modes = torch.from_numpy(np.stack([mode.real, mode.imag], axis=1)).float()

    def worker(comm):
        tensors = [("x", modes[comm.rank].clone())]
        return flat(run_rounds(comm, tw.Mix(topology), period, tensors)[0])

    before = modes.double() - modes.double().mean(0)
    after = torch.stack(tw.LocalWorld(size).run(worker))
    after = after - after.mean(0)
    assert (after.norm() / before.norm()).item() == pytest.approx((1 - gap) ** period, abs=1e-5)


# ---- hierarchies, and what is refused ----


@pytest.mark.parametrize(
    "inner", [RING, tw.Exponential(), tw.topology.Hierarchical(RING, workers_per_node=2)], ids=repr
)
@pytest.mark.parametrize("kind", [tw.Mix, tw.PushSum])
def test_a_hierarchy_is_the_flat_graph_that_it_equals(kind, inner):
    topology, x = tw.topology.Hierarchical(inner, workers_per_node=2), starts(8)
    for step in range(4):
        x = torch.from_numpy(topology.matrix(step, 8)) @ x
    torch.testing.assert_close(estimates(kind(topology), 8, 4), x, rtol=0, atol=1e-5)


def test_push_sum_weights_in_a_hierarchy():
    topology = tw.topology.Hierarchical(DIRECTED, workers_per_node=2)
    z = estimates(tw.PushSum(topology), 8, 60)
    torch.testing.assert_close(z, starts(8).mean(0).expand_as(z), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("averager", "message"),
    [
        (tw.Mix(DIRECTED), "not doubly stochastic.*PushSum"),
        (tw.Mix(tw.topology.Star(weights="uniform")), "not doubly stochastic.*metropolis"),
        (tw.Moniqua(DIRECTED), "not doubly stochastic"),
        (tw.Choco(tw.Exponential()), r"must not change with time.*repeats every 2 steps.*Ring\(\)"),
        (tw.DeepSqueeze(tw.topology.DirectedRing()), "not symmetric"),
        (tw.PowerGossip(DIRECTED), "not symmetric"),
        (tw.Mix(step_size=1.6), r"must be below 1.5 on Ring\(\) with 4 workers.*1 is the fastest"),
        (tw.PowerGossip(step_size=1.6), "must be below 1.5"),
        (tw.PowerGossip(tw.topology.Linear()), "must not change with time"),
        (tw.Mix(tw.topology.Hypercube()), None),
        (tw.Mix(tw.topology.Graph(((0, 1), (1, 2)))), "cannot connect 4 workers"),
    ],
    ids=repr,
)
def test_topologies_that_do_not_suit(averager, message):
    def worker(comm):
        if message is None:
            return averager.init(start(comm.rank), comm)
        with pytest.raises(ValueError, match=message):
            averager.init(start(comm.rank), comm)

    tw.LocalWorld(4, timeout_seconds=60).run(worker)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: tw.Choco(RING, 3), "codec must be a codec"),
        (lambda: tw.Choco(RING, tw.Threshold(0.1)), "vary in size"),
        (lambda: tw.Choco(RING, tw.chain(tw.TopK(0.1), tw.ALQ(bits=2))), "gossip asks neighbours only; use Mean"),
        (lambda: tw.DeepSqueeze(RING, tw.TernGrad(shared=True)), "gossip asks neighbours only; use Mean"),
        (lambda: tw.Choco(RING, tw.RandomK(0.1, shared=True)), "needs one key for all workers"),
        (lambda: tw.Choco(step_size=0.0), "step_size must be above 0 and finite, or None, got 0.0"),
        (lambda: tw.DeepSqueeze(step_size=-1.5), "step_size must be above 0"),
        (lambda: tw.Mix(step_size=float("inf")), "step_size must be above 0"),
        (lambda: tw.PowerGossip(rank=0), "rank must be an integer, 1 or more"),
        (lambda: tw.PowerGossip(iterations=0), "iterations must be an integer, 1 or more"),
        (lambda: tw.PowerGossip(shared_p=True), "add warm_start=False"),
        (lambda: tw.PowerGossip(rank=2, sign_p=True), "sign_p needs rank 1"),
        (lambda: tw.Moniqua(bits=1), "bits must be an integer from 2 to 8"),
        (lambda: tw.Moniqua(theta=0.0), "theta must be above 0 and finite"),
        (lambda: tw.Mix(3), "topology must be a topology"),
    ],
)
def test_mistakes(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_a_round_takes_the_tensors_of_init():
    def worker(comm):
        state = tw.Mix().init(start(comm.rank), comm)
        with pytest.raises(ValueError, match="in their order; expected 4 tensors"):
            tw.Mix().step(state, start(comm.rank)[::-1], comm)
        with pytest.raises(ValueError, match="no loss scale"):
            tw.Mix().step(state, start(comm.rank), comm, scale=2.0)

    tw.LocalWorld(2).run(worker)


def test_a_state_of_another_averager_is_refused():
    def worker(comm):
        saved = tw.Choco().init(start(comm.rank), comm).state_dict()
        with pytest.raises(ValueError, match="only one of the saved state and this averager has memory"):
            tw.Mix().init(start(comm.rank), comm).load_state_dict(saved)
        del saved["memory"]["public"]["scale"]
        with pytest.raises(ValueError, match=r"does not fit this model.*scale"):
            tw.Choco().init(start(comm.rank), comm).load_state_dict(saved)

    tw.LocalWorld(2).run(worker)


@pytest.mark.parametrize("averager", [tw.Choco(), tw.DeepSqueeze()], ids=repr)
def test_memory_stays_finite_where_a_factor_overflows_its_payload(averager):
    """The payload's scale is finite and the factor is 1.008; their product is not."""

    def worker(comm):
        x = torch.tensor([3.4e38, 0.68e38]) * (comm.rank == 0)
        state = averager.init([("x", x)], comm, seed=5)
        averager.step(state, [("x", x)], comm).wait()
        averager.commit(state)
        return all(t.isfinite().all() for t in vars(state.memory).values() if isinstance(t, torch.Tensor))

    assert all(tw.LocalWorld(2).run(worker))


def test_autograd_notices_that_a_round_has_moved_a_parameter():
    def worker(comm):
        p = torch.nn.Parameter(torch.ones(4) * comm.rank)
        loss, averager = p.square().sum(), tw.Mix()
        averager.step(averager.init([("p", p)], comm), [("p", p)], comm).wait()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    tw.LocalWorld(2).run(worker)
