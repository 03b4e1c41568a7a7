"""`local_updates` in fragments, with a delay, weights, pull and averaged states, against float64 simulations; resuming."""

from __future__ import annotations

import copy
import math
import threading
import warnings
from dataclasses import dataclass

import pytest
import torch
from helpers.spawn import run_threads
from torch import nn

import thinwire as tw
from thinwire.strategy.local.fragments import divide, offset

SPARSE = tw.Mean(tw.TopK(0.3), tw.ErrorFeedback(), min_ndim=0)
SIZES = (3, 4, 2)  # of the layers


class Quadratic(nn.Module):
    """The loss of worker i is 1/2 |x - i|^2 over three layers, so the gradient is x - i, rescaled by step and layer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ParameterList([torch.linspace(-1, 1, n) for n in SIZES])

    def set_gradients(self, rank, step):
        for i, p in enumerate(self.layers):
            p.grad = gradient(p.detach(), rank, step, i)


def gradient(x, rank, step, layer):
    return (x - rank) * (1 + 0.3 * ((step + layer + rank) % 3))


def vector(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def train(comm, averager, steps, lr=0.1, **options):
    model = Quadratic()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    handle = tw.local_updates(model, optimizer, averager, comm=comm, **options)
    for step in range(steps):
        model.set_gradients(comm.rank, step)
        optimizer.step()
    return vector(model), handle


def run(size, averager, steps, **options):
    """The final parameters of each worker."""
    return run_threads(size, lambda comm: train(comm, averager, steps, **options)[0])


class Nesterov:
    """v = m v + g; anchor -= lr (g + m v), for each fragment on its own."""

    def __init__(self, lr=0.7, momentum=0.9):
        self.lr, self.momentum, self.v = lr, momentum, {}

    def __call__(self, key, anchor, g):
        self.v[key] = self.momentum * self.v.get(key, 0) + g
        return anchor - self.lr * (g + self.momentum * self.v[key])


def simulate(size, steps, every, groups, delay, alpha, outers, lr=0.1, mix=None, pull=0.0):
    """Streaming DiLoCo by hand in float64; `groups` has the layers of each fragment, `mix` a matrix for each round.

    With `mix` the worker's own outer optimizer applies `P g + pull (anchor - P anchor)`.
    """
    x = [[torch.linspace(-1, 1, n).double() for n in SIZES] for _ in range(size)]
    anchors = copy.deepcopy(x)
    pending = {}

    def merge(layers):
        due, mixed = pending.pop(layers)
        for layer in layers:
            for i in range(size):
                g = due[layer][i] + pull * (anchors[i][layer] - mixed[layer][i])
                anchors[i][layer] = outers[i](layer, anchors[i][layer], g)
                x[i][layer] = alpha * x[i][layer] + (1 - alpha) * anchors[i][layer]

    for t in range(1, steps + 1):
        for i in range(size):
            x[i] = [p - lr * gradient(p, i, t - 1, layer) for layer, p in enumerate(x[i])]
        position = (t - 1) % every + 1
        for p, layers in enumerate(groups):
            begin = offset(p, len(groups), every)
            if layers in pending and (position - begin) % every == delay:
                merge(layers)
            if position == begin:
                matrix = torch.full((size, size), 1 / size) if mix is None else torch.from_numpy(mix((t - 1) // every))
                changes = {n: torch.stack([anchors[i][n] - x[i][n] for i in range(size)]) for n in layers}
                copies = {n: torch.stack([anchors[i][n] for i in range(size)]) for n in layers}
                mean = {n: matrix.double() @ g for n, g in changes.items()}
                pending[layers] = mean, {n: matrix.double() @ a if mix else a for n, a in copies.items()}
                if delay == 0:
                    merge(layers)
    return torch.stack([torch.cat(parts) for parts in x])


@pytest.mark.parametrize(
    ("fragments", "groups", "delay", "alpha"),
    [
        (1, [(0, 1, 2)], 0, 0.0),
        (1, [(0, 1, 2)], 3, 0.5),
        (2, [(0, 2), (1,)], 0, 0.25),
        (2, [(0, 2), (1,)], 4, 0.5),  # the next fragment begins while this one is in flight
        (["layers.[12]", "*"], [(1, 2), (0,)], 1, 0.0),
    ],
)
def test_streaming_diloco_is_its_simulation(fragments, groups, delay, alpha):
    """At every step, also those between the begin of a round and its merging."""
    options = {"every": 5, "outer": tw.OuterSGD(), "fragments": fragments, "delay": delay, "alpha": alpha}
    for steps in (13, 22):
        expected = simulate(3, steps, 5, groups, delay, alpha, [Nesterov() for _ in range(3)])
        result = torch.stack(run(3, tw.Mean(), steps, **options))
        assert torch.allclose(result.double(), expected, rtol=0, atol=1e-5)
        assert not torch.equal(result[0], result[1])


def rounds_by_hand(comm, steps, every):
    """Phases 1 to 4 with the averager and the outer optimizer alone, in float32."""
    model = Quadratic()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    anchors = [(f"layers.{i}", nn.Parameter(p.detach().clone())) for i, p in enumerate(model.layers)]
    outer = tw.OuterSGD()([a for _, a in anchors])
    state = SPARSE.init(anchors, comm, 0)
    for step in range(steps):
        model.set_gradients(comm.rank, step)
        optimizer.step()
        if (step + 1) % every == 0:
            changes = [(name, a.detach() - p.detach()) for (name, a), p in zip(anchors, model.layers, strict=True)]
            SPARSE.step(state, changes, comm).wait()
            SPARSE.commit(state)
            for (_, a), (_, g) in zip(anchors, changes, strict=True):
                a.grad = g
            outer.step()
            for (_, a), p in zip(anchors, model.layers, strict=True):
                p.data.copy_(a.detach())
    return vector(model)


def test_one_fragment_without_delay_is_plain_local_updates_bit_for_bit():
    by_hand = run_threads(3, rounds_by_hand, 14, 4)
    results = run(3, SPARSE, 14, every=4, outer=tw.OuterSGD())
    assert all(torch.equal(a, b) for a, b in zip(by_hand, results, strict=True))


def test_the_model_is_divided_as_documented():
    names = [f"blocks.{i}.{part}" for i in range(5) for part in ("weight", "bias")]
    assert [len(part) for part in divide(names, 3)] == [4, 4, 2]
    assert sorted(sum(divide(names, 3), [])) == sorted(names)
    with pytest.raises(ValueError, match="fragments must be 1 to 5, the number of layers, got 6"):
        divide(names, 6)
    with pytest.raises(ValueError, match=r"no pattern of fragments matches parameter 'blocks\.1\.weight'"):
        divide(names, ["blocks.0.*"])
    with pytest.raises(ValueError, match="match no parameter that is left"):
        divide(names, ["*", "blocks.0.*"])


# ---- resuming, and what flies ----


def resume(comm, averager, break_at, options):
    def start(saved=None):
        model = Quadratic()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        handle = tw.local_updates(model, optimizer, averager, comm=comm, **options)
        for part, state in zip((model, optimizer, handle), saved or (), strict=False):
            part.load_state_dict(state)
        return model, optimizer, handle

    def steps(parts, numbers):
        for step in numbers:
            parts[0].set_gradients(comm.rank, step)
            parts[1].step()
        return copy.deepcopy([part.state_dict() for part in parts])  # waits, so that others may use the communicator

    whole, first = start(), start()
    steps(whole, range(23))
    saved = steps(first, range(break_at))
    flying = [fragment.in_flight for fragment in first[2]._fragments]
    steps(first, range(break_at, break_at + 2))  # what was saved is a copy
    second = start(saved)
    steps(second, range(break_at, 23))
    return torch.equal(vector(whole[0]), vector(second[0])), flying


@pytest.mark.parametrize(
    ("averager", "more"),
    [
        (SPARSE, {"outer": tw.OuterSGD(), "weights": tw.strategy.InverseNorm()}),
        (tw.Mix(tw.Ring()), {"outer": tw.OuterSGD(), "pull": 0.3}),
        (tw.PushSum(tw.Exponential()), {"state_every": {"exp_avg": 3}}),
    ],
    ids=["weights", "pull", "pushsum"],
)
def test_a_run_resumed_with_fragments_in_flight_is_bit_identical(averager, more):
    options = {"every": 6, "fragments": 2, "delay": 4, "alpha": 0.5} | more
    for same, flying in run_threads(3, resume, averager, 12, options):
        assert same
        assert flying == [True, True]


@dataclass(frozen=True, repr=False)
class Held(tw.Mean):
    """Its rounds end when `released` is set."""

    released = threading.Event()

    def step(self, state, tensors, comm, scale=1.0):
        handle = super().step(state, tensors, comm, scale)
        wait = handle.wait
        handle.wait = lambda: (self.released.wait(30) or pytest.fail("the step waited for the round"), wait())[1]
        return handle


def release_late(comm):
    model = Quadratic()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = tw.local_updates(model, optimizer, Held(), 4, delay=3, comm=comm)
    for step in range(6):  # the round begins at step 4, and is merged at step 7
        model.set_gradients(comm.rank, step)
        optimizer.step()
    Held.released.set()
    handle.synchronize()
    return vector(model)


def test_steps_do_not_wait_for_a_round_in_flight():
    Held.released.clear()
    a, b = run_threads(2, release_late)
    assert torch.equal(a, b)


def test_detaching_merges_what_is_in_flight():
    def detached(comm):
        model = Quadratic()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with tw.local_updates(model, optimizer, tw.Mean(), 4, delay=3, comm=comm):
            for step in range(4):
                model.set_gradients(comm.rank, step)
                optimizer.step()
            before = vector(model)
        return before, vector(model)

    (a0, a), (b0, b) = run_threads(2, detached)
    assert torch.equal(a, b)
    assert not torch.equal(a0, b0)


# ---- weights, pull, states, schedules, scalers, bytes ----


def test_inverse_norms_weigh_and_outliers_drop():
    def worker(comm):
        statistics, weights = tw.strategy.NormStatistics(), tw.strategy.InverseNorm(outlier=2.0)
        means = []
        for round in range(8):
            norm = [1.0 + 0.1 * (round % 2), 2.0, 1000.0 if round == 6 else 4.0][comm.rank]
            g = torch.tensor([norm if round != 7 or comm.rank else float("inf")])
            weights.scale([g], statistics, comm)
            means.append(comm.all_reduce(g.double()).wait().item() / 3)
        return means, statistics.num_dropped

    results = run_threads(3, worker)
    for round in range(8):
        norms = [1.0 + 0.1 * (round % 2), 2.0, 4.0]
        norms = norms[1:] if round == 7 else norms[:2] if round == 6 else norms
        expected = len(norms) / sum(1 / n for n in norms)  # sum_i w_i g_i with w_i = (1/n_i) / sum_j 1/n_j
        assert [means[round] for means, _ in results] == pytest.approx([expected] * 3, rel=1e-6)
    assert [dropped for _, dropped in results] == [1, 0, 1]


def test_weighted_rounds_are_their_simulation():
    x, anchor = torch.zeros(3, 9, dtype=torch.float64) + vector(Quadratic()).double(), vector(Quadratic()).double()
    sizes = [layer for layer, n in enumerate(SIZES) for _ in range(n)]
    for step in range(8):
        for i in range(3):
            factors = torch.tensor([1 + 0.3 * ((step + layer + i) % 3) for layer in sizes])
            x[i] -= 0.1 * (x[i] - i) * factors
        if step % 4 == 3:
            changes = anchor - x
            weights = 1 / changes.norm(dim=1)
            anchor = anchor - (changes * (weights / weights.sum())[:, None]).sum(0)
            x[:] = anchor
    for result in run(3, tw.Mean(), 8, every=4, weights=tw.strategy.InverseNorm()):
        assert torch.allclose(result.double(), anchor, rtol=0, atol=1e-5)


def test_noloco_is_its_simulation():
    """Outer steps are mixed with neighbours', and a term pulls the anchors together."""
    topology, gamma = tw.Exponential(), 0.4
    expected = simulate(
        4,
        18,
        4,
        [(0, 1, 2)],
        2,
        0.5,
        [Nesterov(0.5, 0.3) for _ in range(4)],
        mix=lambda t: topology.matrix(t, 4),
        pull=gamma,
    )
    options = {"every": 4, "outer": tw.OuterSGD(0.5, 0.3), "pull": gamma, "delay": 2, "alpha": 0.5}
    result = torch.stack(run(4, tw.Mix(topology), 18, **options))
    assert torch.allclose(result.double(), expected, rtol=0, atol=1e-5)


def averaged_states(comm):
    model = Quadratic()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    tw.local_updates(model, optimizer, tw.Mean(), 100, state_every={"exp_avg": 2, "exp_avg_sq": 3}, comm=comm)
    history = []
    for step in range(6):
        model.set_gradients(comm.rank, step)
        optimizer.step()
        history.append([optimizer.state[p][key].clone() for key in ("exp_avg", "exp_avg_sq") for p in model.layers])
    return history


def test_optimizer_states_have_periods_of_their_own():
    a, b = run_threads(2, averaged_states)
    for step, (ours, theirs) in enumerate(zip(a, b, strict=True), start=1):
        equal = [torch.equal(x, y) for x, y in zip(ours, theirs, strict=True)]
        assert equal == [step % 2 == 0] * 3 + [step % 3 == 0] * 3
    with pytest.raises(ValueError, match="state_every names 'momentum', and the states of AdamW are"):
        run_threads(1, resume, tw.Mean(), 5, {"every": 6, "state_every": {"momentum": 2}})


def scheduled(parameters):
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)


def test_an_outer_schedule_steps_once_a_period():
    class Once:  # the simulation calls each worker's outer step; the schedule is common
        def __init__(self):
            self.rate = {}

        def __call__(self, key, anchor, g):
            self.rate[key] = self.rate.get(key, 2.0) / 2
            return anchor - self.rate[key] * g

    expected = simulate(2, 12, 4, [(0, 2), (1,)], 0, 0.0, [Once(), Once()])
    result = torch.stack(run(2, tw.Mean(), 12, every=4, fragments=2, outer=scheduled))
    assert torch.allclose(result.double(), expected, rtol=0, atol=1e-5)
    for same, _ in run_threads(2, resume, tw.Mean(), 9, {"every": 4, "fragments": 2, "delay": 1, "outer": scheduled}):
        assert same


def with_a_scaler(comm):
    """Worker 1 meets an infinite gradient in one step, which its scaler skips."""
    model = Quadratic()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    tw.local_updates(model, optimizer, tw.Mean(), 3, comm=comm, scaler=scaler)
    for step in range(6):
        loss = sum(0.5 * (p - comm.rank).square().sum() for p in model.layers)
        optimizer.zero_grad()
        scaler.scale(loss * (float("inf") if comm.rank == 1 and step == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    return vector(model)


def test_a_step_that_the_scaler_skips_counts():
    a, b = run_threads(2, with_a_scaler)
    assert torch.equal(a, b)
    assert torch.isfinite(a).all()


def two_with_one_scaler(comm):
    """Updates after each of two optimizers, as in a GAN. The first model is detached early."""
    models = [Quadratic(), Quadratic()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    handles = [
        tw.local_updates(model, optimizer, tw.Mean(), 3, comm=comm, scaler=scaler)
        for model, optimizer in zip(models, optimizers, strict=True)
    ]
    for step in range(9):
        for model, optimizer in zip(models, optimizers, strict=True):
            loss = sum(0.5 * (p - comm.rank).square().sum() for p in model.layers)
            optimizer.zero_grad()
            scaler.scale(loss * (float("inf") if comm.rank == 1 and step % 3 == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        if step == 5:
            handles[0].detach()
    steps = [handle.state_dict()[f"rank{comm.rank}"]["num_steps"] for handle in handles]
    handles[1].detach()
    return steps, "step" in vars(scaler), vector(models[1])


def test_one_scaler_steps_several_models():
    (steps, is_changed, a), (others, _, b) = run_threads(2, two_with_one_scaler)
    assert steps == others == [6, 9] and not is_changed
    assert torch.equal(a, b)


def goes_on_after_close(comm):
    """In a thread, for it may not hang; the state is read, and then a round begins in vain."""
    model = Quadratic()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = tw.local_updates(model, optimizer, tw.Mean(), every=2, delay=1, comm=comm)
    said = []

    def steps(count):
        for _ in range(count):
            model.set_gradients(comm.rank, 0)
            optimizer.step()

    def after_close():
        said.append(handle.state_dict()[f"rank{comm.rank}"]["num_steps"])
        try:
            steps(3)
        except Exception as error:
            said.append(str(error))

    steps(3)
    comm.close()
    thread = threading.Thread(target=after_close, daemon=True)
    thread.start()
    thread.join(30)
    return said


def test_after_its_communicator_is_closed_the_state_is_there_and_a_round_is_an_error():
    for saved, *error in run_threads(2, goes_on_after_close):
        assert saved == 3 and "closed" in error[0]


def test_the_ledger_has_peak_and_mean():
    def counted(comm, fragments):
        ledger = train(comm, tw.Mean(), 12, every=6, fragments=fragments)[1].ledger
        return ledger.as_dict(), ledger.bytes_sent

    for whole, _ in run_threads(2, counted, 1):
        assert whole["peak_bytes_sent"] == 4 * 9
    for parts, sent in run_threads(2, counted, 3):
        assert parts["peak_bytes_sent"] == 4 * 4  # the largest layer
        assert parts["mean_bytes_sent"] == sent / 12


@pytest.mark.parametrize("averager", [tw.Mean(), tw.Mix()], ids=repr)
@pytest.mark.parametrize("delay", [0, 1])
def test_the_ledger_counts_dense_training_of_two_strategies(averager, delay):
    """Of `Local` its 4 steps, and of `Gradients` its 3 rounds, over one communicator."""

    def counted(comm):
        local, other = nn.Linear(3, 2), nn.Linear(2, 4)
        optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
        handles = [
            tw.local_updates(local, optimizer, averager, 2, comm=comm, delay=delay),
            tw.compress_gradients(other, tw.Mean(), comm=comm),
        ]
        assert comm.ledger.dense_fp32_bytes == 0
        for step in range(4):
            local(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            if step:
                other(torch.ones(1, 2)).sum().backward()
        for handle in reversed(handles):
            handle.detach()
        return comm.ledger.dense_fp32_bytes, comm.ledger.dense_bf16_bytes

    expected = 4 * 8 + 3 * 12
    assert run_threads(2, counted) == [(4 * expected, 2 * expected)] * 2


def explode(comm):
    """Worker 0's changes are infinite in the first round, while messages fly."""
    model = Quadratic()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tw.local_updates(model, optimizer, SPARSE, 3, delay=2, alpha=0.5, comm=comm, on_nonfinite="apply")
    for step in range(5):
        model.set_gradients(comm.rank, step)
        if step == 2 and comm.rank == 0:
            model.layers[0].grad[0] = float("inf")
        optimizer.step()
    return vector(model)


def test_changes_that_are_not_finite_are_given_up_with_a_delay():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = run_threads(2, explode)
    assert sorted(str(w.message) for w in caught) == [
        f"rank {r}: changes were not finite and are given up" for r in range(2)
    ]
    assert all(torch.equal(x, vector(Quadratic())) for x in results)


@pytest.mark.parametrize(
    ("averager", "options"),
    [(tw.Mix(), {}), (tw.Mean(), {"weights": tw.strategy.InverseNorm()})],
    ids=["Mix", "weights"],
)
def test_a_worker_that_gave_up_its_changes_goes_on_with_the_others(averager, options):
    """The others kept a share of their own parameters, so only they had a round in `synchronize`; or it kept a share of NaN."""

    def worker(comm):
        model = Quadratic()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = tw.local_updates(model, optimizer, averager, 3, alpha=0.5, comm=comm, on_nonfinite="apply", **options)
        for step in range(3):
            model.set_gradients(comm.rank, step)
            if step == 2 and comm.rank == 0:
                model.layers[0].grad[0] = math.nan
            optimizer.step()
        own = vector(model)
        handle.synchronize()
        return own, vector(model)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        results = run_threads(2, worker)
    assert all(own.isfinite().all() for own, _ in results)
    assert torch.equal(results[0][1], results[1][1]) and not torch.equal(results[0][1], vector(Quadratic()))
