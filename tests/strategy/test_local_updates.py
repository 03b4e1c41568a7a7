"""`local_updates`: Local SGD, DiLoCo and gossip every H steps against float64 simulations; resume, failures, bytes."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
from helpers.interruptions import interrupt_once
from helpers.spawn import WORLDS, run_threads, spawn
from torch import nn

import thinwire as tw
from thinwire.strategy.local import rounds

SPARSE = tw.Mean(tw.TopK(0.1), tw.ErrorFeedback(), min_ndim=0)
DIRECTED = tw.topology.DirectedGraph(
    ((0, 1), (1, 2), (2, 3), (3, 0), (0, 2))
)  # irregular, so that push-sum's weights differ from 1


def nesterov(parameters):
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


@pytest.mark.parametrize(("momentum", "is_nesterov"), [(0.9, True), (0.9, False), (0.0, False)])
def test_outer_sgd_is_pytorch_s_but_for_rounding(momentum, is_nesterov):
    gradients, ends = torch.randn(5, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), []
    for make in (
        tw.OuterSGD(0.7, momentum, is_nesterov),
        lambda anchors: torch.optim.SGD(anchors, lr=0.7, momentum=momentum, nesterov=is_nesterov),
    ):
        anchor = nn.Parameter(torch.ones(30, dtype=torch.float64))
        optimizer = make([anchor])
        for gradient in gradients:
            anchor.grad = gradient.clone()
            optimizer.step()
        ends.append(anchor.detach())
    torch.testing.assert_close(*ends, rtol=1e-14, atol=1e-14)


def make_model(seed=0):
    """The same for the same seed, also where threads build models at the same time."""
    model, generator = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.5, generator=generator)
    return model


def backward(model, rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(4, 5, generator=generator).to(next(model.parameters()).dtype)
    loss = nn.functional.cross_entropy(model(x), torch.randint(0, 3, (4,), generator=generator))
    model.zero_grad()
    loss.backward()


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


INNER = {"sgd": sgd, "adamw": adamw}


def train(comm, averager, every, steps, outer=None, inner="sgd"):
    """Each worker starts from a model of its own, to be made equal to that of rank 0."""
    model = make_model(seed=comm.rank)
    optimizer = INNER[inner](model)
    handle = tw.local_updates(model, optimizer, averager, every, outer, comm=comm, seed=3)
    for step in range(steps):
        backward(model, comm.rank, step)
        optimizer.step()
    return flat(model), handle.ledger.as_dict()


def own_state(handle):
    """This worker's part of the state, without its identity."""
    state = handle.state_dict()[f"rank{handle.comm.rank}"]
    return state | {"averager": state["fragments"][0]["state"]}


def load(model, vector):
    nn.utils.vector_to_parameters(vector.clone(), model.parameters())


def simulate(size, every, steps, outer, inner="sgd"):
    """In float64: workers in turn, `outer(anchor, g)` gives the new anchor."""
    models = [make_model().double() for _ in range(size)]
    optimizers = [INNER[inner](model) for model in models]
    anchor = flat(models[0])
    for step in range(steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            backward(model, rank, step)
            optimizer.step()
        if (step + 1) % every == 0:
            anchor = outer(anchor, anchor - torch.stack([flat(model) for model in models]).mean(0))
            for model in models:
                load(model, anchor)
    return torch.stack([flat(model) for model in models])


class HandWrittenNesterov:
    """DiLoCo's outer step: v = m v + g, anchor -= lr (g + m v)."""

    def __init__(self):
        self.v = 0.0

    def __call__(self, anchor, g):
        self.v = 0.9 * self.v + g
        return anchor - 0.7 * (g + 0.9 * self.v)


def data_parallel(comm, steps):
    """Dense data-parallel SGD."""
    model = make_model()
    optimizer = sgd(model)
    for step in range(steps):
        backward(model, comm.rank, step)
        for p in model.parameters():
            comm.all_reduce(p.grad).wait()
            p.grad /= comm.size
        optimizer.step()
    return flat(model)


@pytest.mark.parametrize("world", WORLDS)
def test_a_round_at_every_step_is_data_parallel_sgd(world):
    expected = run_threads(3, data_parallel, 20)[0]
    for x, _ in WORLDS[world](3, train, tw.Mean(), 1, 20):
        assert torch.allclose(x, expected, rtol=0, atol=1e-6)  # 20 steps, each rounded at 6e-8


@pytest.mark.parametrize("world", WORLDS)
def test_local_sgd_is_its_simulation(world):
    """Also in the middle of a period, where workers differ."""
    for steps in (12, 14):
        expected = simulate(3, 4, steps, lambda anchor, g: anchor - g)
        results = [x for x, _ in WORLDS[world](3, train, tw.Mean(), 4, steps)]
        assert torch.allclose(torch.stack(results).double(), expected, rtol=0, atol=2e-6)
        assert all(torch.equal(x, results[0]) for x in results) == (steps == 12)


@pytest.mark.parametrize("world", WORLDS)
def test_diloco_is_hand_written_nesterov(world):
    expected = simulate(3, 5, 20, HandWrittenNesterov(), inner="adamw")
    results = [x for x, _ in WORLDS[world](3, train, tw.Mean(), 5, 20, nesterov, "adamw")]
    assert torch.allclose(torch.stack(results).double(), expected, rtol=0, atol=1e-5)
    assert all(torch.equal(x, results[0]) for x in results)


def test_a_lone_worker_with_a_plain_outer_step_trains_as_alone():
    expected = simulate(1, 3, 9, lambda anchor, g: anchor - g)[0]
    assert torch.allclose(run_threads(1, train, tw.Mean(), 3, 9)[0][0].double(), expected, rtol=0, atol=1e-6)


# ---- changes that are known: SGD with learning rate 1 applies the gradients that the test sets ----


def change(rank, step, shape):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(shape, generator=generator)


def apply_known_changes(comm, averager, every, steps, outer=None, synchronize=False):
    model = nn.Linear(6, 4, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    handle = tw.local_updates(model, optimizer, averager, every, outer, comm=comm)
    for step in range(steps):
        model.weight.grad = change(comm.rank, step, (4, 6))
        optimizer.step()
    if synchronize:
        handle.synchronize()
    return model.weight.detach(), own_state(handle)


def period_changes(size, every, rounds):
    """(rounds, size, 24) in float64: what each worker's steps of each period add up to."""
    steps = [torch.stack([change(rank, step, 24) for rank in range(size)]).double() for step in range(every * rounds)]
    return torch.stack(steps).view(rounds, every, size, 24).sum(1)


def test_error_feedback_conserves_mass():
    """start - anchor = 1/W sum of all changes - 1/W sum of what memory holds."""
    results = run_threads(4, apply_known_changes, SPARSE, 3, 15)
    residual = torch.stack([saved["averager"]["memory"]["residual"]["weight"] for _, saved in results]).double().mean(0)
    expected = 1.0 - period_changes(4, 3, 5).sum(0).mean(0) + residual
    assert residual.abs().max() > 0.5
    for x, _ in results:
        assert torch.allclose(x.reshape(-1).double(), expected, rtol=0, atol=1e-5)


def gossip_simulation(topology, size, every, rounds):
    """x <- P (x - changes), w <- P w; gives x and w."""
    x, w = torch.ones(size, 24, dtype=torch.float64), torch.ones(size, 1, dtype=torch.float64)
    for step, changes in enumerate(period_changes(size, every, rounds)):
        matrix = torch.from_numpy(topology.matrix(step, size))
        x, w = matrix @ (x - changes), matrix @ w
    return x, w


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("averager", [tw.Mix(tw.Ring()), tw.Mix(tw.Exponential()), tw.PushSum(DIRECTED)], ids=repr)
def test_gossip_every_few_steps_is_its_simulation(averager, world):
    x, w = gossip_simulation(averager.topology, 4, 3, 5)
    results = WORLDS[world](4, apply_known_changes, averager, 3, 15)
    z = torch.stack([weight.reshape(-1) for weight, _ in results]).double()
    assert torch.allclose(z, x / w, rtol=0, atol=2e-5)
    assert (w != 1).any() == (averager.topology == DIRECTED)


@pytest.mark.parametrize(
    "averager", [tw.Mix(tw.Ring()), tw.PushSum(DIRECTED), tw.Choco(tw.Ring(), tw.TopK(0.1))], ids=repr
)
def test_synchronize_averages_the_rest_and_leaves_the_mean(averager):
    """Two steps are left over after four periods of three."""
    results = run_threads(4, apply_known_changes, averager, 3, 14, None, True)
    all_changes = sum(torch.stack([change(rank, step, 24) for rank in range(4)]).double() for step in range(14))
    for x, saved in results:
        assert torch.equal(x, results[0][0]) or averager.topology == DIRECTED  # x = w mean, and x / w rounds
        assert torch.allclose(x.reshape(-1).double(), 1.0 - all_changes.mean(0), rtol=0, atol=1e-5)
        assert saved["step"] == 0


def test_synchronize_under_mean_ends_the_period():
    results = run_threads(3, apply_known_changes, tw.Mean(), 4, 6, None, True)
    changes = sum(torch.stack([change(rank, step, 24) for rank in range(3)]).double() for step in range(6))
    for x, _ in results:
        assert torch.equal(x, results[0][0])
        assert torch.allclose(x.reshape(-1).double(), 1.0 - changes.mean(0), rtol=0, atol=1e-5)


def change_by_hand(comm, averager):
    """An exchange, then rank 1 changes its parameters without a step; the bytes of two calls of `synchronize`."""
    model = nn.Linear(6, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    handle = tw.local_updates(model, optimizer, averager, 1, comm=comm)
    model.weight.grad = change(comm.rank, 0, (4, 6))
    optimizer.step()
    before, counts = model.weight.detach().clone(), [handle.ledger.bytes_sent]
    if comm.rank == 1:
        with torch.no_grad():
            model.weight.add_(3.0)
    for _ in range(2):
        handle.synchronize()
        counts.append(handle.ledger.bytes_sent)
    return before, model.weight.detach(), [b - a for a, b in zip(counts, counts[1:], strict=False)]


@pytest.mark.parametrize("averager", [tw.Mean(), tw.Mix(tw.Ring())], ids=repr)
def test_synchronize_averages_what_a_program_changed_between_an_exchange_and_itself(averager):
    results = run_threads(3, change_by_hand, averager)
    mean = torch.stack([before for before, _, _ in results]).double().mean(0)  # gossip of three is the mean already
    for _, x, (first, second) in results:
        assert torch.equal(x, results[0][1])
        assert torch.allclose(x.double(), mean + 1.0, rtol=0, atol=1e-5)
        assert first - second == {tw.Mean(): 2 * 2 * 4 * 24 // 3, tw.Mix(tw.Ring()): 2 * 4 * 24}[averager]


def test_outer_momentum_under_gossip_moves_the_mean_as_diloco_does():
    results = run_threads(4, apply_known_changes, tw.Mix(tw.Ring()), 3, 15, nesterov)
    outer, anchor = HandWrittenNesterov(), torch.ones(24, dtype=torch.float64)
    for g in period_changes(4, 3, 5).mean(1):
        anchor = outer(anchor, g)
    x = torch.stack([weight.reshape(-1) for weight, _ in results]).double()
    assert torch.allclose(x.mean(0), anchor, rtol=0, atol=2e-5)
    assert x.std(0).max() > 0.1


# ---- resume ----


def through_a_file(saved):
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resume(comm, averager, outer, inner, break_at):
    """Trains 13 steps in one go, and again with a break after some."""

    def start(saved=None):
        model = make_model()
        optimizer = INNER[inner](model)
        handle = tw.local_updates(model, optimizer, averager, 3, outer, comm=comm)
        if saved is not None:
            for part, state in zip((model, optimizer, handle), saved, strict=True):
                part.load_state_dict(state)
        return model, optimizer, handle

    def steps(parts, numbers):
        for step in numbers:
            backward(parts[0], comm.rank, step)
            parts[1].step()

    whole, first = start(), start()
    steps(whole, range(13))
    steps(first, range(break_at))
    saved = through_a_file([copy.deepcopy(part.state_dict()) for part in first])
    steps(first, range(2))  # what was saved is a copy
    second = start(saved)
    steps(second, range(break_at, 13))
    return torch.equal(flat(whole[0]), flat(second[0])), saved[2][f"rank{comm.rank}"]


@pytest.mark.parametrize(
    ("averager", "outer"),
    [
        (SPARSE, nesterov),
        (tw.PowerSGD(rank=1), None),
        (tw.PushSum(DIRECTED), nesterov),
        (tw.Choco(tw.Ring(), tw.TopK(0.1)), None),
    ],
    ids=["sparse-nesterov", "powersgd", "pushsum-nesterov", "choco"],
)
@pytest.mark.parametrize("break_at", [6, 7])
def test_a_resumed_run_is_bit_identical(averager, outer, break_at):
    for same, saved in run_threads(4, resume, averager, outer, "adamw", break_at):
        assert same
        assert saved["step"] == break_at % 3
        assert list(saved["anchor"]) == ["0.weight", "0.bias", "2.weight", "2.bias"]
        assert set(saved["outer"]["state"]) <= set(saved["anchor"])


def by_dimension(parameters):
    """An outer optimizer whose numbers are not in the order of the names."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim < 2], "lr": 1.0},
        {"params": [p for p in parameters if p.ndim > 1]},
    ]
    return torch.optim.SGD(groups, lr=0.5, momentum=0.5)


def test_an_outer_optimizer_with_groups_is_saved_by_name():
    for same, saved in run_threads(2, resume, tw.Mean(), by_dimension, "sgd", 7):
        assert same
        assert [group["params"] for group in saved["outer"]["param_groups"]] == [
            ["0.bias", "2.bias"],
            ["0.weight", "2.weight"],
        ]
        assert saved["outer"]["state"]["2.bias"]["momentum_buffer"].shape == (3,)


# ---- what is not finite ----


def with_an_infinity(comm, averager):
    """Rank 1 meets an infinity in the third round; states and parameters around it."""
    model = nn.Linear(6, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    handle = tw.local_updates(model, optimizer, averager, 2, nesterov, comm=comm, on_nonfinite="apply")
    history = []
    for step in range(8):
        model.weight.grad = change(comm.rank, step, (4, 6))
        if step == 4 and comm.rank == 1:
            model.weight.grad[0, 0] = float("inf")
        optimizer.step()
        if step % 2:
            history.append((model.weight.detach().clone(), copy.deepcopy(own_state(handle))))
    return history


def test_an_infinite_change_leaves_no_trace_under_mean():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = run_threads(3, with_an_infinity, SPARSE)
    assert sorted(str(w.message) for w in caught) == [
        f"rank {r}: changes were not finite and are given up" for r in range(3)
    ]
    for history in results:
        (before, saved), (after, saved_after), (last, _) = history[1:]
        assert torch.equal(before, after)
        residuals = [s["averager"]["memory"]["residual"]["weight"] for s in (saved, saved_after)]
        assert torch.equal(*residuals)
        momentum, momentum_after = (s["outer"]["state"]["weight"]["momentum_buffer"] for s in (saved, saved_after))
        assert torch.equal(momentum, momentum_after)
        assert torch.isfinite(last).all()
        assert not torch.equal(after, last)
        assert torch.equal(last, results[0][3][0])


def test_an_infinite_change_stays_at_home_under_gossip():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = run_threads(4, with_an_infinity, tw.Choco(tw.Ring(), tw.TopK(0.1)))
    assert [str(w.message) for w in caught] == ["rank 1: changes were not finite and are given up"]
    for rank, history in enumerate(results):
        momentum, momentum_after = (history[i][1]["outer"]["state"]["weight"]["momentum_buffer"] for i in (1, 2))
        assert torch.equal(momentum, momentum_after) == (rank == 1)
        assert all(torch.isfinite(x).all() for x, _ in history)


# ---- buffers, bytes, the end, mistakes ----


def with_running_statistics(comm):
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    optimizer = sgd(model)
    handle = tw.local_updates(model, optimizer, tw.Mean(), 2, comm=comm)
    for _ in range(3):
        model(torch.full((4, 2), float(comm.rank))).sum().backward()
        optimizer.step()
    local = model[0].running_mean.clone()
    handle.synchronize()
    return local, model[0].running_mean, int(model[0].num_batches_tracked)


def test_buffers_are_local_until_synchronized():
    for rank, (local, mean, count) in enumerate(run_threads(3, with_running_statistics)):
        assert torch.allclose(local, torch.full((2,), rank * (1 - 0.9**3)))
        assert torch.allclose(mean, torch.full((2,), 1 - 0.9**3))
        assert count == 3


def bytes_by_step(comm, averager):
    model, counts = nn.Linear(6, 4, bias=False), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    handle = tw.local_updates(model, optimizer, averager, 3, comm=comm)
    for step in range(6):
        before = handle.ledger.bytes_sent
        model.weight.grad = change(comm.rank, step, (4, 6))
        optimizer.step()
        counts.append(handle.ledger.bytes_sent - before)
    handle.detach()
    before = handle.ledger.bytes_sent
    for _ in range(3):
        optimizer.step()
    assert handle.ledger.bytes_sent == before
    return counts, handle.seconds


def test_bytes_are_sent_in_rounds_only():
    dense, gossip = 2 * 3 * 4 * 24 // 4, 2 * 4 * 24
    for averager, num_bytes in [(tw.Mean(), dense), (tw.Mix(tw.Ring()), gossip)]:
        for counts, seconds in run_threads(4, bytes_by_step, averager):
            assert counts == [0, 0, num_bytes, 0, 0, num_bytes]
            assert {"measure", "outer"} <= seconds.keys()


def attach(comm, averager, every, outer=None):
    model = make_model()
    return tw.local_updates(model, sgd(model), averager, every[comm.rank], outer, comm=comm)


def test_momentum_of_the_averager_and_of_the_outer_optimizer_is_refused():
    with pytest.raises(ValueError, match="momentum 0.9 of its own"):
        run_threads(2, attach, tw.dgc(0.1), [2, 2], nesterov)


def test_workers_that_disagree_fail_together_in_processes():
    errors = spawn(2, attach, tw.Mean(), [2, 3], return_errors=True)
    assert all(isinstance(error, ValueError) and "every: 2 on rank 0; 3 on rank 1" in str(error) for error in errors)


def own_group(comm):
    """Without a communicator it makes its own, and closes it."""
    model = make_model(comm.rank)
    optimizer = sgd(model)
    handle = tw.local_updates(model, optimizer, SPARSE, 2, nesterov)
    handle.set_epoch(1)
    for step in range(4):
        backward(model, comm.rank, step)
        optimizer.step()
    handle.detach()
    return flat(model)


def test_a_process_group_of_its_own():
    a, b = spawn(2, own_group)
    assert torch.equal(a, b)


def low_precision(comm):
    """Outer steps far below bfloat16's resolution add up in the anchor."""
    model = nn.Linear(4, 1, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    handle = tw.local_updates(model, optimizer, tw.Mean(), 1, lambda p: torch.optim.SGD(p, lr=0.001), comm=comm)
    for _ in range(20):
        model.weight.grad = torch.full_like(model.weight, 0.25)
        optimizer.step()
    return own_state(handle)["anchor"]["weight"]


def test_the_anchor_is_float32():
    anchor = run_threads(2, low_precision)[0]
    assert anchor.dtype == torch.float32
    assert anchor[0, 0] == pytest.approx(1.0 - 20 * 0.25 * 0.001, abs=2e-4)  # bfloat16 could not leave 1.0


GRADIENTS = (-2_000.0, -2_000.0, -2_000.0, 320.0, 320.0)


@pytest.mark.parametrize("averager", [tw.Mean(), tw.Mix(tw.Ring())], ids=repr)
def test_an_outer_step_that_float16_cannot_hold_is_given_up(averager):
    """Momentum carries an anchor from 64,000 beyond 65,504: anchor and momentum go back, and later steps go on from there."""

    def worker(comm):
        model = nn.Linear(2, 1, bias=False).half()
        with torch.no_grad():
            model.weight.copy_(torch.tensor([[60_000.0, 1.0]]))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

        def momentum(parameters):
            return torch.optim.SGD(parameters, lr=1.0, momentum=0.9)

        handle = tw.local_updates(model, optimizer, averager, 1, momentum, comm=comm)
        seen = []
        for step in GRADIENTS:
            model.weight.grad = torch.tensor([[step, 0.0]], dtype=torch.float16)
            optimizer.step()
            seen.append(model.weight[0, 0].item())
        handle.detach()
        return seen

    # float64: d = x - p; v <- 0.9 v + d; x <- x - v. 62,000 + 3,800 does not fit, and its v is forgotten.
    expected, gives_up, x, v = [], [], 60_000.0, 0.0
    for step in GRADIENTS:
        change = 0.9 * v + x - (torch.tensor(x).half() - step).item()
        gives_up.append(x - change > 65_504)
        if not gives_up[-1]:
            x, v = x - change, change
        expected.append(torch.tensor(x).half().item())
    assert gives_up == [False, True, True, False, False]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert run_threads(2, worker) == [expected] * 2
    assert sorted(str(one.message) for one in caught) == sorted(
        f"rank {rank}: changes were not finite and are given up" for rank in (0, 1) for _ in range(2)
    )


def test_steps_that_another_number_of_workers_loses_are_said_once():
    def saves(comm):
        model = make_model()
        handle = tw.local_updates(model, sgd(model), tw.Mean(), 4, comm=comm)
        for step in range(5):
            backward(model, comm.rank, step)
            handle._optimizer.step()
        anchor = handle.state_dict()[f"rank{comm.rank}"]["anchor"]
        return handle.state_dict(), anchor["0.weight"].clone()

    states, anchors = zip(*run_threads(2, saves), strict=True)

    def loads(comm):
        model = make_model()
        handle = tw.local_updates(model, sgd(model), tw.Mean(), 4, comm=comm)
        handle.load_state_dict(states[0] | states[1])
        return model.state_dict()["0.weight"].clone()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        models = run_threads(3, loads)
    assert all(torch.equal(model, anchors[0]) for model in models)
    (said,) = caught
    assert str(said.message).startswith(
        "Local: what workers changed since their last rounds belongs to no worker now, and is lost"
    )
    assert said.filename == rounds.__file__  # so that a command line says it as a line of the package


@pytest.mark.parametrize("averager", [tw.Mean(), tw.Mix()], ids=repr)
def test_a_round_that_is_interrupted_is_the_last_one(averager):
    """Other workers may have ended it, and then anchors would differ for good."""

    def worker(comm):
        model = make_model()
        optimizer = sgd(model)
        handle = tw.local_updates(model, optimizer, averager, 2, comm=comm)

        def steps(number):
            for step in range(number):
                backward(model, comm.rank, step)
                optimizer.step()

        steps(3)
        interrupt_once(comm, "all_reduce" if averager.traits.gives_one_mean else "exchange")
        with pytest.raises(KeyboardInterrupt):
            steps(1)
        for go_on in (handle.synchronize, lambda: steps(2)):
            with pytest.raises(ValueError, match="broke off the last round"):
                go_on()
        handle.detach()
        with tw.local_updates(model, optimizer, averager, 2, comm=comm):
            steps(2)

    run_threads(2, worker)
