"""PowerSGD: held to its definition in float64, to the SVD, to its formula of bytes, and to DDP in real processes."""

from __future__ import annotations

import zlib
from itertools import pairwise

import pytest
import torch
from helpers.gradients import fingerprint, train, train_with_scaler
from helpers.ledgers import ledger_of_round
from helpers.spawn import spawn
from helpers.states import leaves
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import thinwire as tw
from thinwire import kernels
from thinwire.average.low_rank import matrices
from thinwire.kernels import low_rank

SHAPES = {"conv.weight": (16, 3, 3, 3), "conv.bias": (16,), "fc.weight": (20, 40), "small": (3, 4), "scale": ()}
SEED = 5


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gradients(rank, step):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return [(name, torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()]


def run_steps(comm, averager, inputs, num_steps, scale=1.0):
    """The results of each step, and the state after all. `inputs(rank, step)` are the gradients."""
    state, results = averager.init(inputs(comm.rank, 0), comm, SEED), []
    for step in range(num_steps):
        tensors = [(name, t.clone() * scale) for name, t in inputs(comm.rank, step)]
        averager.step(state, tensors, comm, scale).wait()
        assert averager.commit(state)
        results.append({name: t / scale for name, t in tensors})
    return results, state


def first_q(name, num_rows, rank):
    keys = [tw.codec.Key(SEED, zlib.crc32(name.encode()), column).mixed() for column in range(rank)]
    return torch.stack([2 * kernels.uniform(key, num_rows) - 1 for key in keys], dim=1).double()


def paper(name, inputs, rank, num_workers, num_steps):
    """Algorithms 1 and 2 of the paper in float64, all workers in one place: memory keeps M_i - P Q' with the mean Q."""
    shape = SHAPES[name]
    n, m = shape[0], torch.Size(shape[1:]).numel()
    q, memories = first_q(name, m, rank), [torch.zeros(n, m, dtype=torch.float64)] * num_workers
    for step in range(num_steps):
        matrices = [dict(inputs(i, step))[name].double().view(n, m) + memories[i] for i in range(num_workers)]
        p = torch.linalg.qr(sum(x @ q for x in matrices) / num_workers).Q
        q = sum(x.t() @ p for x in matrices) / num_workers
        memories = [x - p @ q.t() for x in matrices]
        yield (p @ q.t()).view(shape), sum(memories).view(shape)


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("rank", [1, 3])
def test_it_is_the_algorithm_of_the_paper(num_workers, rank):
    """Results and the sum of the memories are those of float64; float32 moves them by some units of 1e-6."""
    averager = tw.PowerSGD(rank=rank)
    everyone = tw.LocalWorld(num_workers).run(lambda comm: run_steps(comm, averager, gradients, 6))
    for name in ("conv.weight", "fc.weight"):
        for step, (expected, lost) in enumerate(paper(name, gradients, rank, num_workers, 6)):  # noqa: B007
            torch.testing.assert_close(everyone[0][0][step][name].double(), expected, rtol=0, atol=1e-4)
        total = sum(state.memory.residual[name].double() for _, state in everyone).view(lost.shape)
        torch.testing.assert_close(total, lost, rtol=0, atol=1e-4)
    for name in ("conv.bias", "scale", *(["small"] if rank == 3 else [])):
        for step, result in enumerate(everyone[0][0]):
            mean = sum(dict(gradients(i, step))[name] for i in range(num_workers)) / num_workers
            torch.testing.assert_close(result[name], mean, rtol=1e-6, atol=1e-6)


def test_what_was_sent_and_what_is_kept_is_all_there_was():
    """W * sum of results + sum of memories = sum of all gradients."""
    everyone = tw.LocalWorld(3).run(lambda comm: run_steps(comm, tw.PowerSGD(rank=2), gradients, 30))
    for name in ("conv.weight", "fc.weight"):
        sent = sum(3 * result[name].double() for result in everyone[0][0])
        kept = sum(state.memory.residual[name].double() for _, state in everyone).view(sent.shape)
        total = sum(dict(gradients(i, step))[name].double() for i in range(3) for step in range(30))
        torch.testing.assert_close(sent + kept, total, rtol=0, atol=1e-3)


def test_memories_of_unlike_workers_do_not_grow():
    """Opposite constant gradients cancel in the mean and are never sent; the paper's memories would reach 100 times."""

    def opposite(rank, step):
        return [("w", randn(20, 30) * (1 - 2 * rank) + randn(20, 30, seed=1 + step))]

    _, state = tw.LocalWorld(2).run(lambda comm: run_steps(comm, tw.PowerSGD(rank=2), opposite, 100))[0]
    assert state.memory.residual["w"].norm() < 100 * randn(20, 30).norm()


@pytest.mark.parametrize("averager", [tw.PowerSGD(rank=3), tw.PowerSGD(rank=10**6), tw.PowerSGD(3, memory=None)])
def test_matrices_within_the_rank_give_the_exact_mean(averager):
    """Whether P spans their mean (rank 3), or they travel dense because the rank leaves nothing to gain.

    One step: with memory, errors of rounding grow by about 8 a step when the row space is another one every time, in
    float64 as well.
    """

    def inputs(rank, step):
        return [("w", randn(40, 3, seed=9) @ randn(3, 50, seed=10 * rank + step)), ("b", randn(4, seed=rank))]

    results, _ = tw.LocalWorld(4).run(lambda comm: run_steps(comm, averager, inputs, 1))[2]
    for step, result in enumerate(results):
        for name, got in result.items():
            mean = sum(dict(inputs(rank, step))[name] for rank in range(4)) / 4
            torch.testing.assert_close(got, mean, rtol=0, atol=2e-5)


def test_warm_start_converges_to_the_best_approximation():
    """A constant matrix with a spectral gap; without memory each step is one more power iteration."""
    u, s, v = torch.linalg.svd(randn(60, 80), full_matrices=False)
    s = torch.cat([torch.tensor([10.0, 8.0, 6.0, 5.0]), torch.linspace(2, 0.1, 56)])
    x = u @ torch.diag(s) @ v
    averager = tw.PowerSGD(rank=4, memory=None)
    results, _ = tw.LocalWorld(2).run(lambda comm: run_steps(comm, averager, lambda *_: [("w", x)], 25))[0]
    errors = [((x - result["w"]).norm() / s[4:].norm()).item() for result in results]
    assert errors[0] > 1.1
    assert all(later <= earlier * (1 + 1e-6) for earlier, later in pairwise(errors))
    torch.testing.assert_close(results[-1]["w"], u[:, :4] @ torch.diag(s[:4]) @ v[:4], rtol=0, atol=1e-4)


@pytest.mark.parametrize("averager", [tw.PowerSGD(rank=1), tw.PowerSGD(rank=2), tw.PowerSGD(2, memory=None)])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_ledger_holds_the_formula(averager, size):
    """2(W-1)/W * 4 (sum of r(n + m) + dense), in two all-reduces a call."""

    def worker(comm):
        return ledger_of_round(comm, averager, gradients(comm.rank, 0))

    low_rank, dense = averager.rank * (16 + 27 + 20 + 40), 16 + 12 + 1
    if averager.rank == 1:  # 3 + 4 < 12
        low_rank, dense = low_rank + 7, dense - 12
    ledgers = tw.LocalWorld(size).run(worker)
    assert sum(ledger.bytes_sent for ledger in ledgers) == 2 * (size - 1) * 4 * (low_rank + dense)
    for ledger in ledgers:
        assert ledger.collectives["all_reduce"].calls == 2 and len(ledger.collectives) == 1
        assert ledger.dense_numel == 16 * 27 + 16 + 800 + 12 + 1


def test_without_matrices_there_is_one_all_reduce():
    def worker(comm):
        x = torch.full((3,), float(comm.rank))
        return ledger_of_round(comm, tw.PowerSGD(), [("b", x)]).collectives["all_reduce"].calls, x.tolist()

    assert tw.LocalWorld(3).run(worker) == [(1, [1.0] * 3)] * 3


@pytest.mark.parametrize("seen_before", [False, True])
def test_zero_gradients(seen_before):
    """They give zeros, not NaN, and do not put an end to the warm start: it goes on as if they had never come."""

    def with_zeros(rank, step):
        matrices = [("w", randn(20, 30) + randn(20, 30, seed=step + 1)), ("b", torch.ones(3))]
        return [(name, t * (step not in ((2, 3) if seen_before else (0, 1)))) for name, t in matrices]

    def without(rank, step):
        return with_zeros(rank, step if seen_before and step < 2 else step + 2)

    averager = tw.PowerSGD(rank=2, memory=None)
    results, state = tw.LocalWorld(2).run(lambda comm: run_steps(comm, averager, with_zeros, 6))[0]
    expected, _ = tw.LocalWorld(2).run(lambda comm: run_steps(comm, averager, without, 4))[0]
    at = 2 if seen_before else 0
    assert not any(t.any() for result in results[at : at + 2] for t in result.values())
    assert all(torch.equal(results[-1][name], expected[-1][name]) for name in expected[-1])
    assert state.q["w"].shape == (2, 30)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-12, 1e12, 1e30])
def test_any_magnitude(magnitude):
    def inputs(factor):
        return lambda rank, step: [("w", randn(20, 30, seed=10 * step + rank) * factor)]

    averager = tw.PowerSGD(rank=2)
    results, _ = tw.LocalWorld(2).run(lambda comm: run_steps(comm, averager, inputs(magnitude), 5))[0]
    expected, _ = tw.LocalWorld(2).run(lambda comm: run_steps(comm, averager, inputs(1.0), 5))[0]
    for got, want in zip(results, expected, strict=True):
        torch.testing.assert_close(got["w"] / magnitude, want["w"], rtol=0, atol=1e-4)


def test_more_columns_than_rank_deficient_matrices_have():
    """Columns of P beyond the matrix's own rank are any orthonormal ones; nothing is counted twice."""
    x = torch.outer(randn(40), randn(50, seed=1))
    results, _ = tw.LocalWorld(2).run(lambda comm: run_steps(comm, tw.PowerSGD(rank=8), lambda *_: [("w", x)], 10))[0]
    for result in results:
        torch.testing.assert_close(result["w"], x, rtol=0, atol=1e-4)


def test_loss_scale_does_not_matter():
    """The same bits at scale 1 and at powers of two; memory in unscaled units."""

    def worker(comm, scale):
        results, state = run_steps(comm, tw.PowerSGD(rank=2), gradients, 4, scale)
        return results, leaves(state.memory.state_dict()), state.q

    plain, scaled = (tw.LocalWorld(2).run(worker, scale)[1] for scale in (1.0, 1024.0))
    assert all(torch.equal(a[name], b[name]) for a, b in zip(plain[0], scaled[0], strict=True) for name in SHAPES)
    for a, b in zip(plain[1:], scaled[1:], strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("where", ["fc.weight", "conv.bias", "small"])
def test_a_step_that_is_not_finite_leaves_no_trace(bad, where):
    def worker(comm):
        averager = tw.PowerSGD(rank=2)
        _, state = run_steps(comm, averager, gradients, 2)
        before = leaves(state.state_dict())
        tensors = gradients(comm.rank, 2)
        if comm.rank == 1:
            dict(tensors)[where].view(-1)[7] = bad
        averager.step(state, tensors, comm).wait()
        assert not averager.commit(state)
        after = leaves(state.state_dict())
        assert all(torch.equal(before[name], after[name]) for name in before)
        return torch.isfinite(dict(tensors)[where]).all().item()

    assert tw.LocalWorld(3).run(worker) == [False] * 3


def test_discard_leaves_no_trace():
    def worker(comm):
        averager = tw.PowerSGD(rank=2)
        _, state = run_steps(comm, averager, gradients, 2)
        before = leaves(state.state_dict())
        averager.step(state, gradients(comm.rank, 7)[:3], comm).wait()
        averager.discard(state)
        after = leaves(state.state_dict())
        return all(torch.equal(before[name], after[name]) for name in before)

    assert all(tw.LocalWorld(2).run(worker))


def test_rank_may_follow_a_schedule():
    """Q is cut and extended; a rank beyond all gain sends everything, memory included."""
    averager = tw.PowerSGD(rank=tw.schedule.Values((2, 1, 3, 1000, 2), unit="step"))
    assert tw.parse(repr(averager)) == averager

    def worker(comm):
        state = averager.init(gradients(comm.rank, 0), comm, SEED)
        columns, sent = [], []
        for step in range(5):
            tensors, before = gradients(comm.rank, step), comm.ledger.bytes_sent
            averager.step(state, tensors, comm).wait()
            averager.commit(state)
            columns.append(len(state.q["fc.weight"]))
            sent.append((comm.ledger.bytes_sent - before) // 4)
            if step == 3:
                assert not any(lost.any() for lost in state.memory.residual.values())
        return columns, sent

    dense = 16 + 1
    columns, sent = tw.LocalWorld(2).run(worker)[0]
    assert columns == [2, 1, 3, 3, 2]
    assert sent == [
        2 * 103 + 12 + dense,
        103 + 7 + dense,
        3 * 103 + 12 + dense,
        432 + 800 + 12 + dense,
        2 * 103 + 12 + dense,
    ]


def test_resumed_state_is_the_same_state(tmp_path):
    def worker(comm, resume):
        averager, results = tw.PowerSGD(rank=2), []
        state = averager.init(gradients(comm.rank, 0), comm, SEED)
        for step in range(6):
            if resume and step == 3:
                torch.save(state.state_dict(), tmp_path / f"{comm.rank}.pt")
                state = averager.init(gradients(comm.rank, 0), comm, SEED + 1)
                state.load_state_dict(torch.load(tmp_path / f"{comm.rank}.pt", weights_only=True))
            tensors = gradients(comm.rank, step)
            averager.step(state, tensors, comm).wait()
            averager.commit(state)
            results.append([t for _, t in tensors])
        assert state.progress == tw.schedule.Progress(step=6)
        return results

    resumed, straight = (tw.LocalWorld(2).run(worker, resume)[1] for resume in (True, False))
    assert all(torch.equal(a, b) for x, y in zip(resumed, straight, strict=True) for a, b in zip(x, y, strict=True))


def test_a_state_that_does_not_fit_is_refused():
    def worker(comm):
        def state(name="w", shape=(9, 9), **options):
            return tw.PowerSGD(**options).init([(name, torch.zeros(shape))], comm)

        with pytest.raises(ValueError, match="only one of the saved state and this averager has memory"):
            state(memory=None).load_state_dict(state().state_dict())
        with pytest.raises(ValueError, match=r"does not fit this model: \['v', 'w'\]"):
            state("v").load_state_dict(state().state_dict())
        with pytest.raises(ValueError, match="Q of 'w' has 9 rows, expected 8"):
            state(shape=(9, 8)).load_state_dict(state().state_dict())

    tw.LocalWorld(1).run(worker)


@pytest.mark.parametrize("rank", [0, -1, 2.5, "4", None])
def test_mistakes(rank):
    with pytest.raises(ValueError, match="rank must be an integer, 1 or more"):
        tw.PowerSGD(rank=rank)


def test_half_precision_strided_and_empty_tensors():
    def worker(comm):
        x = torch.outer(torch.arange(8.0), torch.ones(10)).to(torch.bfloat16) * (1 + comm.rank)
        y = torch.outer(torch.arange(8.0), torch.ones(10)).double().t() * (1 + comm.rank)
        z = (
            torch.outer(torch.ones(8), torch.ones(36)).view(8, 4, 3, 3).to(memory_format=torch.channels_last)
            * comm.rank
        )
        tensors = [("x", x), ("y", y), ("z", z), ("none", torch.zeros(0, 7)), ("no columns", torch.zeros(7, 0))]
        averager = tw.PowerSGD(rank=1)
        state = averager.init(tensors, comm)
        averager.step(state, tensors, comm).wait()
        assert averager.commit(state)
        return x, y, z

    for x, y, z in tw.LocalWorld(2).run(worker):
        expected = 1.5 * torch.outer(torch.arange(8.0), torch.ones(10))
        torch.testing.assert_close(x.float(), expected, rtol=2.0**-8, atol=0)
        torch.testing.assert_close(y, expected.double().t(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(z.contiguous(), torch.full((8, 4, 3, 3), 0.5), rtol=1e-6, atol=0)


def test_memory_sees_the_mean_before_it_is_rounded_to_a_shorter_type():
    """The estimate that all workers share stays the mean of their own ones; rounded means would let it drift away."""

    def worker(comm):
        averager = tw.PowerSGD(rank=1, memory=tw.memory.EF21())
        tensors = [("w", torch.zeros(6, 9, dtype=torch.bfloat16))]
        state = averager.init(tensors, comm)
        for step in range(8):
            tensors[0][1].copy_(randn(6, 9, seed=10 * step + comm.rank))
            averager.step(state, tensors, comm).wait()
            assert averager.commit(state)
        return state.memory.estimate["w"], state.memory.mean["w"]

    (first, mean), (second, _) = tw.LocalWorld(2).run(worker)
    torch.testing.assert_close(mean, (first + second) / 2, rtol=0, atol=1e-5)


def test_a_memory_that_overflows_the_type_of_a_matrix_leaves_no_trace():
    """The mean of the differences is finite in float16, and its sum with the estimate is not."""

    def worker(comm):
        averager = tw.PowerSGD(rank=1, memory=tw.memory.EF21())
        x = torch.zeros(6, 9, dtype=torch.float16)
        state = averager.init([("w", x)], comm)
        for _ in range(2):  # one of two directions in each
            x.zero_()[:2, :2] = torch.tensor([32000.0, 60000.0]).diag()
            averager.step(state, [("w", x)], comm).wait()
            assert averager.commit(state)
        before = leaves(state.memory.state_dict())
        x.zero_()[1, 1] = 64000.0  # as 32000 at loss scale 2, where most of 60000 stays and float16 ends at 32752
        averager.step(state, [("w", x)], comm, scale=2.0).wait()
        assert x.isinf().any() and not averager.commit(state)
        return all(torch.equal(before[name], after) for name, after in leaves(state.memory.state_dict()).items())

    assert all(tw.LocalWorld(2).run(worker))


# ---- under DDP, in real processes ----


class Deep(nn.Module):
    """Big enough that DDP makes many buckets, and rebuilds them in the order in which gradients arrive."""

    def __init__(self, seed=0):
        super().__init__()
        self.last, self.layers = nn.Linear(24, 4), nn.ModuleList(nn.Linear(24, 24) for _ in range(6))
        self.first = nn.Linear(8, 24)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in self.parameters():
                p.normal_(std=0.2, generator=generator)

    def forward(self, x, _=None):
        x = self.first(x)
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return self.last(x)


def ddp_worker(comm, averager, options):
    torch.set_num_threads(1)
    ddp = DistributedDataParallel(Deep(), **options)
    handle = tw.compress_gradients(ddp, averager, seed=3)
    losses = train(ddp, comm.rank, steps=12, no_sync=handle.no_sync, parameters=ddp.module)
    rounds = handle.ledger.collectives["all_reduce"].calls
    result = fingerprint(ddp.module), losses, rounds, [p.detach().clone() for p in ddp.module.parameters()]
    handle.detach()
    return result


@pytest.mark.parametrize(
    "options", [{}, {"bucket_cap_mb": 0.004}, {"bucket_cap_mb": 0.004, "gradient_as_bucket_view": True}], ids=repr
)
def test_ddp_with_many_buckets_keeps_replicas_identical(options):
    """Whatever the buckets: no deadlock on Gloo, replicas of the same bits, and the same training up to rounding."""
    results = spawn(3, ddp_worker, tw.PowerSGD(rank=2), options)
    assert len({h for h, *_ in results}) == 1
    assert (results[0][2] > 12 * 2 * 3) == ("bucket_cap_mb" in options)

    def plain_worker(comm):
        model = Deep(seed=comm.rank)
        handle = tw.compress_gradients(model, tw.PowerSGD(rank=2), comm=comm, seed=3)
        train(model, comm.rank, steps=12, no_sync=handle.no_sync)
        handle.detach()
        return [p.detach() for p in model.parameters()]

    for got, expected in zip(results[0][3], tw.LocalWorld(3).run(plain_worker)[0], strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-3)


def scaler_worker(comm, poison_step):
    states, scales, model = train_with_scaler(comm, tw.PowerSGD(rank=1), poison_step)
    for name, value in states[poison_step].items():
        assert torch.equal(value, states[poison_step - 1][name])
        assert not torch.equal(value, states[poison_step + 1][name])
    return model, scales[poison_step - 1 : poison_step + 1]


def test_a_loss_scaler_skips_the_step_on_every_worker():
    results = spawn(3, scaler_worker, 2)
    assert len({h for h, _ in results}) == 1
    assert all(after == before / 2 for _, (before, after) in results)


class ReadsTf32(TorchDispatchMode):
    """Matrix products as the units of a GPU compute them: factors are rounded to 10 bits of mantissa."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        args, kwargs = list(args), kwargs or {}
        name = func.overloadpacket._qualified_op_name
        for i in {"aten::mm": (0, 1), "aten::addmm_": (1, 2), "aten::addmm": (1, 2)}.get(name, ()):
            bits = args[i].contiguous().view(torch.int32)
            args[i] = ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)
        return func(*args, **kwargs)


def test_memory_keeps_what_was_not_sent_under_tensor_float_32(monkeypatch):
    """The sum of the workers' gradients is W times the mean and what their memories keep, to the precision of float32."""
    shapes = [("a", (24, 40)), ("b", (24, 40)), ("c", (30, 30))]
    given = [
        [(name, randn(*shape, seed=10 * rank + len(name) + shape[0])) for name, shape in shapes] for rank in range(2)
    ]
    monkeypatch.setattr(low_rank, "_reads_tf32", lambda device: True)

    def worker(comm):
        tensors = [(name, t.clone()) for name, t in given[comm.rank]]
        averager = tw.PowerSGD(rank=2)
        state = averager.init(tensors, comm, SEED)
        with ReadsTf32():
            averager.step(state, tensors, comm).wait()
        assert averager.commit(state)
        return dict(tensors), state.memory.residual

    with kernels.use_backend("reference"):
        results = tw.comm.LocalWorld(2).run(worker)
    for name, shape in shapes:
        kept = sum(residual[name].double().view(shape) for _, residual in results)
        total = sum(dict(of_rank)[name].double() for of_rank in given)
        assert (2 * results[0][0][name].double() + kept - total).norm() < 2e-6 * total.norm()


def test_matrices_of_one_shape_share_a_decomposition(monkeypatch):
    decomposed, orthonormal = [], low_rank.orthonormal
    monkeypatch.setattr(low_rank, "orthonormal", lambda stack: decomposed.append(stack.shape) or orthonormal(stack))
    ps = [randn(2, 24, seed=i) for i in range(5)] + [randn(2, 30, seed=9), torch.zeros(2, 24)]
    bases = matrices.bases(ps)
    assert sorted(decomposed) == [(1, 2, 30), (6, 2, 24)]
    for p, basis in zip(ps, bases, strict=True):
        assert torch.equal(basis, orthonormal(p)) and basis.is_contiguous()
