"""Gossip about parameters while training: held to float64 simulations in matrix form, and what the handle promises."""

from __future__ import annotations

import copy
import io
import threading

import pytest
import torch
from helpers.interruptions import interrupt_once
from torch import nn

import thinwire as tw
from thinwire.comm import CommunicationError

AVERAGERS = [
    tw.Mix(),
    tw.Mix(tw.Exponential()),
    tw.PushSum(),
    tw.PushSum(tw.topology.Linear()),
    tw.Choco(tw.Ring(), tw.TopK(0.1), step_size=0.2),
    tw.DeepSqueeze(tw.Ring(), tw.QSGD(bits=4), step_size=0.05),
    tw.PowerGossip(tw.Ring(), iterations=2),
    tw.Moniqua(theta=8.0, bits=4),
    tw.Mix(tw.topology.Hierarchical(tw.Ring(), workers_per_node=2)),
    tw.PushSum(tw.topology.Hierarchical(tw.Exponential(), workers_per_node=2)),
]
every_averager = pytest.mark.parametrize("averager", AVERAGERS, ids=repr)
SIZE = 4
# In these graphs workers send to different numbers of others, so that push-sum's weights differ from 1.
DIRECTED = tw.topology.DirectedGraph(((0, 1), (1, 2), (2, 0), (0, 2), (2, 3), (3, 0)))
CHANGING = tw.topology.Phases(
    ((0, tw.topology.DirectedRing()), (3, tw.topology.Star(weights="uniform")), (7, DIRECTED))
)
LATE = {"overlap": True, "staleness": 2, "order": "adapt_then_combine"}
MODES = [
    {},
    {"order": "adapt_then_combine"},
    {"overlap": True},
    {"overlap": True, "staleness": 1},
    {"overlap": True, "staleness": 3},
    {"overlap": True, "staleness": 1, "order": "adapt_then_combine"},
    LATE,
]
every_mode = pytest.mark.parametrize("mode", MODES, ids=str)
# Each averager in two modes, and each mode with two averagers or more.
in_pairs = pytest.mark.parametrize(
    ("averager", "mode"), [(a, MODES[(i + j) % len(MODES)]) for i, a in enumerate(AVERAGERS) for j in (0, 3)], ids=str
)
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.2),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05),
}


class Bowl(nn.Module):
    """The loss `1/2 sum h (w - c)^2`, with curvature h and centre c of the worker's own, and two parameters."""

    def __init__(self, rank: int):
        super().__init__()
        generator = torch.Generator().manual_seed(rank)
        self.matrix = nn.Parameter(torch.randn(3, 4, generator=generator))
        self.vector = nn.Parameter(torch.randn(4, generator=generator))
        self.curvature, self.centre = bowl(rank)

    def forward(self) -> torch.Tensor:
        w = torch.cat([self.matrix.reshape(-1), self.vector])
        return 0.5 * (self.curvature * (w - self.centre).square()).sum()


def bowl(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    return 0.5 + torch.rand(16, generator=generator), torch.randn(16, generator=generator) + rank


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model().backward()
    optimizer.step()


def train(comm, averager, num_steps, optimizer="momentum", **mode):
    """Each step's model, (steps, n), with the round in flight at the end absorbed."""
    model = Bowl(comm.rank)
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    handle = tw.gossip_parameters(model, optimizer, averager, comm=comm, seed=3, **mode)
    path = []
    for _ in range(num_steps):
        train_step(model, optimizer)
        path.append(flat(model))
    handle.detach()
    return torch.stack([*path, flat(model)])


class Simulation:
    """All workers' models as one matrix (W, n) in float64, PyTorch's optimizers on it, and rounds as matrix products."""

    def __init__(self, change, optimizer, overlap=False, staleness=0, order="combine_then_adapt"):
        curvature, centre = (torch.stack(part).double() for part in zip(*map(bowl, range(SIZE)), strict=True))
        self.gradient = lambda z: curvature * (z - centre)
        self.x = nn.Parameter(flat(Bowl(0)).expand(SIZE, -1).clone())
        self.w = torch.ones(SIZE, 1, dtype=torch.float64)
        self.optimizer, self.change = OPTIMIZERS[optimizer]([self.x]), change
        self.overlap, self.staleness, self.combines_first = overlap, staleness, order == "combine_then_adapt"
        self.flight, self.age, self.step, self.round = None, 0, 0, 0

    def run(self, num_steps):
        path = []
        for _ in range(num_steps):
            self.x.grad = self.gradient(self.x.detach() / self.w)
            if self.combines_first and self.step:
                self.combine()
            self.optimizer.step()
            self.step, self.age = self.step + 1, self.age + 1
            if not self.combines_first:
                self.combine()
            if self.overlap and self.flight is None:
                self.flight, self.age = self.begin(), 0
            path.append(self.x.detach() / self.w)
        if self.flight is not None:
            self.absorb(self.flight)
        return torch.stack([*path, self.x.detach() / self.w])

    def begin(self):
        self.round += 1
        return self.change(self.round - 1, self.x.detach()), self.change(self.round - 1, self.w)

    def absorb(self, changes):
        self.x.data += changes[0]
        self.w = self.w + changes[1]
        self.flight = None

    def combine(self):
        if not self.overlap:
            self.absorb(self.begin())
        elif self.flight is not None and self.age >= self.staleness:
            self.absorb(self.flight)


def mixing(topology):
    return lambda step, x: torch.from_numpy(topology.matrix(step, SIZE)) @ x - x


SIMULATED = [
    tw.Mix(),
    tw.Mix(tw.Exponential()),
    tw.PushSum(DIRECTED),
    tw.PushSum(CHANGING),
    tw.Choco(tw.Ring(), tw.codec.Identity(), 1.0),
]
# Every pair of averager and mode, and each averager and each mode with every optimizer.
TRAINED = [
    (averager, list(OPTIMIZERS)[(i + j) % 3], mode)
    for i, averager in enumerate(SIMULATED)
    for j, mode in enumerate(MODES)
]


@pytest.mark.parametrize(("averager", "optimizer", "mode"), TRAINED, ids=str)
def test_training_follows_a_simulation_in_float64(averager, optimizer, mode):
    """D-PSGD, SGP and their late forms: with Identity and step size 1, CHOCO-SGD is D-PSGD."""
    expected = Simulation(mixing(averager.topology), optimizer, **mode).run(12)
    paths = torch.stack(tw.LocalWorld(SIZE).run(lambda comm: train(comm, averager, 12, optimizer, **mode)), dim=1)
    # float32 keeps 7 digits; the values are around 3, and Adam divides by small numbers in its first steps.
    torch.testing.assert_close(paths, expected, rtol=0, atol=1e-4 if optimizer == "adam" else 2e-5)


@every_mode
@pytest.mark.parametrize(
    "averager", [tw.Choco(tw.Ring(), tw.TopK(0.25), 0.3), tw.DeepSqueeze(tw.Ring(), tw.TopK(0.25), 0.3)], ids=repr
)
def test_compressed_methods_follow_a_simulation_in_float64(averager, mode):
    memory = {"public": flat(Bowl(0)).expand(SIZE, -1), "lost": torch.zeros(SIZE, 16, dtype=torch.float64)}
    p = torch.from_numpy(tw.Ring().matrix(0, SIZE))

    def choco(x):
        memory["public"] = memory["public"] + top_quarter(x - memory["public"])
        return 0.3 * (p @ memory["public"] - memory["public"])

    def deepsqueeze(x):
        sent = top_quarter(x + memory["lost"])
        memory["lost"] = x + memory["lost"] - sent
        return 0.3 * (p @ sent - sent)

    change = choco if isinstance(averager, tw.Choco) else deepsqueeze
    simulation = Simulation(lambda step, x: change(x) if x.shape[1] > 1 else 0 * x, "momentum", **mode)
    paths = torch.stack(tw.LocalWorld(SIZE).run(lambda comm: train(comm, averager, 12, **mode)), dim=1)
    torch.testing.assert_close(paths, simulation.run(12), rtol=0, atol=2e-5)


def top_quarter(x):
    """The largest quarter of the (3, 4) matrix and of the vector of 4, of each worker."""
    kept = torch.zeros_like(x)
    for begin, end in ((0, 12), (12, 16)):
        part = x[:, begin:end]
        places = part.abs().topk((end - begin) // 4, dim=1).indices
        kept[:, begin:end].scatter_(1, places, part.gather(1, places))
    return kept


@every_averager
def test_overlap_without_staleness_costs_no_accuracy(averager):
    """The same bits as without overlap: gradients are those at the unmixed point either way."""

    def worker(comm):
        return torch.equal(train(comm, averager, 8)[:-1], train(comm, averager, 8, overlap=True)[:-1])

    assert all(tw.LocalWorld(SIZE).run(worker))


@in_pairs
def test_saving_changes_nothing_and_a_saved_run_resumes_bit_for_bit(averager, mode):
    def worker(comm):
        model, resumed = Bowl(comm.rank), Bowl(comm.rank)
        optimizer, other = (OPTIMIZERS["momentum"](m.parameters()) for m in (model, resumed))
        handle = tw.gossip_parameters(model, optimizer, averager, comm=comm, seed=3, **mode)
        file = io.BytesIO()
        for step in range(10):
            train_step(model, optimizer)
            handle.state_dict()
            saved = {"gossip": handle.state_dict(), "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            if step == 4:
                torch.save(saved, file)
        handle.detach()
        unsaved = train(comm, averager, 10, **mode)[-1]

        file.seek(0)
        saved = torch.load(file, weights_only=True)
        handle = tw.gossip_parameters(resumed, other, averager, comm=comm, seed=3, **mode)
        resumed.load_state_dict(saved["model"])
        other.load_state_dict(saved["optimizer"])
        handle.load_state_dict(saved["gossip"])
        for _ in range(5):
            train_step(resumed, other)
        handle.detach()
        return torch.equal(flat(model), unsaved) and torch.equal(flat(resumed), unsaved)

    assert all(tw.LocalWorld(SIZE).run(worker))


@pytest.mark.parametrize("averager", [tw.PushSum(DIRECTED), tw.PowerGossip(tw.Ring(), iterations=2)], ids=repr)
def test_measuring_does_not_change_training(averager):
    def worker(comm, measure):
        model = Bowl(comm.rank)
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        handle = tw.gossip_parameters(model, optimizer, averager, comm=comm, overlap=True, staleness=1)
        for _ in range(6):
            train_step(model, optimizer)
            if measure:
                handle.consensus_distance()
                with handle.average_model():
                    model()
        handle.detach()
        return flat(model)

    world = tw.LocalWorld(SIZE)
    for measured, not_measured in zip(world.run(worker, True), world.run(worker, False), strict=True):
        assert torch.equal(measured, not_measured)


def test_messages_fly_and_are_decoded_during_forward_and_backward():
    """Rank 1 sends only when rank 0 is in its forward pass; there the round ends while rank 0's main thread stands still."""
    in_forward, sent = threading.Event(), threading.Event()

    def worker(comm):
        model = Bowl(comm.rank)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        handle = tw.gossip_parameters(
            model, optimizer, tw.PowerGossip(tw.Ring(), iterations=3), comm=comm, overlap=True
        )
        if comm.rank == 1:
            assert in_forward.wait(20)
        train_step(model, optimizer)
        sent.set()
        if comm.rank == 0:
            before = flat(model)
            loss = model()
            in_forward.set()
            assert sent.wait(20)
            handle._rounds._flight._outcome.result(timeout=20)  # the round ends; nothing is absorbed
            loss.backward()
            assert handle.seconds["decode"] > 0
            assert torch.equal(flat(model), before)  # it is absorbed by the next step, not in the midst of this one
        handle.detach()
        return not torch.equal(flat(model), before) if comm.rank == 0 else True

    assert all(tw.LocalWorld(2, timeout_seconds=20).run(worker))


class Net(nn.Module):
    def __init__(self, rank: int):
        super().__init__()
        torch.manual_seed(rank)
        self.linear = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("count", torch.tensor(rank))

    def forward(self, x):
        return self.norm(self.linear(x))


def in_lock(comm, function):
    """Modules draw from the global generator; workers that are threads take turns."""
    for rank in range(comm.size):
        if rank == comm.rank:
            result = function()
        comm.barrier()
    return result


@pytest.mark.parametrize("averager", [tw.Mix(), tw.PushSum(DIRECTED)], ids=repr)
@pytest.mark.parametrize("mode", [{}, LATE], ids=str)
def test_the_average_model_is_the_mean_of_all_and_is_restored(averager, mode):
    def worker(comm):
        model = in_lock(comm, lambda: Net(comm.rank))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = tw.gossip_parameters(model, optimizer, averager, comm=comm, **mode)
        equal_start = {name: t.clone() for name, t in model.state_dict().items()}
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + comm.rank)
            optimizer.zero_grad()
            model(torch.randn(5, 3, generator=generator) * (1 + comm.rank)).square().sum().backward()
            optimizer.step()
        before = {name: t.clone() for name, t in model.state_dict().items()}
        distance = handle.consensus_distance()
        with pytest.raises(RuntimeError, match="boom"), handle.average_model():
            mean = {name: t.clone() for name, t in model.state_dict().items()}
            with handle.average_model():
                pass
            with pytest.raises(ValueError, match=r"inside average_model\(\)"):
                optimizer.step()
            raise RuntimeError("boom")
        assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
        weight = handle._rounds.weight
        handle.detach()
        return equal_start, before, mean, distance, weight

    starts, models, means, distances, weights = zip(*tw.LocalWorld(SIZE).run(worker), strict=True)
    for start in starts:
        assert all(torch.equal(start[name], starts[0][name]) for name in start)
    w = torch.tensor(weights, dtype=torch.float64)
    assert sum(weights) == pytest.approx(SIZE)
    squared = 0.0
    for name in models[0]:
        all_of_it = torch.stack([model[name] for model in models]).double()
        is_parameter = name.split(".")[-1] in ("weight", "bias")
        expected = all_of_it[0] if models[0][name].dtype == torch.int64 else all_of_it.mean(0)
        if is_parameter:
            expected = torch.einsum("w,w...->...", w, all_of_it) / SIZE
            squared += (all_of_it - expected).square().sum().item() / SIZE
        for mean in means:
            assert torch.equal(mean[name], means[0][name])
            torch.testing.assert_close(mean[name].double(), expected, rtol=0, atol=1e-6)
    assert not torch.equal(models[0]["norm.running_mean"], models[1]["norm.running_mean"])  # statistics are local
    assert distances == pytest.approx([squared**0.5] * SIZE, rel=1e-5)


def test_frozen_parameters_take_no_part_and_groups_keep_their_rates():
    def worker(comm):
        model = Bowl(comm.rank)
        model.vector.requires_grad_(False)
        optimizer = torch.optim.SGD([{"params": [model.matrix], "lr": 0.0}, {"params": [model.vector], "lr": 0.5}])
        handle = tw.gossip_parameters(model, optimizer, tw.Mix(), comm=comm)
        before = comm.ledger.snapshot()
        with torch.no_grad():
            model.matrix.fill_(comm.rank)
            model.vector.fill_(comm.rank)
        for _ in range(2):
            train_step(model, optimizer)
        sent = comm.ledger.since(before)
        model.vector.requires_grad_(True)
        with pytest.raises(ValueError, match=r"rank \d: parameter 'vector' is trained since later"):
            optimizer.step()
        handle.detach()
        return model.matrix[0, 0].item(), model.vector[0].item(), sent.bytes_sent

    for rank, (mixed, frozen, bytes_sent) in enumerate(tw.LocalWorld(2).run(worker)):
        assert (mixed, frozen, bytes_sent) == (0.5, rank, 4 * 12)  # before the first update nothing is sent


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_scaler_that_skips_a_step_on_one_worker_holds_up_nobody(mode):
    def worker(comm):
        model = Bowl(comm.rank)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        handle = tw.gossip_parameters(model, optimizer, tw.Mix(), comm=comm, scaler=scaler, **mode)
        for step in range(6):
            optimizer.zero_grad()
            scaler.scale(model()).backward()
            if comm.rank == 1 and step in (0, 3):
                model.vector.grad[0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
        handle.detach()
        assert "step" not in vars(scaler)
        return flat(model), scaler.get_scale()

    simulation = Simulation(mixing(tw.Ring()), "sgd", **mode)
    gradient = simulation.gradient

    def masked(z):
        result = gradient(z)
        if simulation.step in (0, 3):
            result[1] = 0.0
        return result

    simulation.gradient = masked
    expected = simulation.run(6)[-1]
    for rank, (mine, scale) in enumerate(tw.LocalWorld(SIZE, timeout_seconds=60).run(worker)):
        assert scale == (1.0 if rank == 1 else 4.0)
        torch.testing.assert_close(mine, expected[rank], rtol=0, atol=2e-5)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_worker_that_steps_less_often_is_an_error_that_names_it(overlap):
    def worker(comm):
        model = Bowl(comm.rank)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        handle = tw.gossip_parameters(model, optimizer, tw.Mix(), comm=comm, overlap=overlap)
        try:
            for step in range(4):
                model().backward()
                if comm.rank == 0 and step == 3:  # nothing more comes
                    comm._mail.timeout_seconds = 1.0
                if comm.rank != 1 or step != 2:
                    optimizer.step()
            handle.detach()
        finally:
            if comm.rank == 0:
                has_failed.set()
        if comm.rank == 1:
            assert has_failed.wait(60)

    has_failed = threading.Event()
    with pytest.raises(CommunicationError, match="nothing came from rank 1 in 1.0 seconds"):
        tw.LocalWorld(2).run(worker)


@pytest.mark.parametrize("averager", [tw.Mix(), tw.PushSum(DIRECTED)], ids=repr)
@every_mode
def test_a_closure_gives_the_same_bits(averager, mode):
    def worker(comm):
        model = Bowl(comm.rank)
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        handle = tw.gossip_parameters(model, optimizer, averager, comm=comm, seed=3, **mode)
        path = []
        for step in range(6):

            def closure():
                optimizer.zero_grad()
                loss = model()
                loss.backward()
                return loss

            loss = optimizer.step(closure) if step % 2 else optimizer.step(closure=closure)
            assert loss > 0
            path.append(flat(model))
        handle.detach()
        return torch.equal(torch.stack([*path, flat(model)]), train(comm, averager, 6, **mode))

    assert all(tw.LocalWorld(SIZE).run(worker))


def test_an_optimizer_that_evaluates_several_times_a_step_has_one_round_in_it():
    def worker(comm):
        model = Bowl(comm.rank)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=2 + comm.rank, tolerance_change=0)
        handle = tw.gossip_parameters(model, optimizer, tw.PushSum(DIRECTED), comm=comm, overlap=True)

        seen = []

        def closure():
            seen.append(flat(model))
            optimizer.zero_grad()
            loss = model()
            loss.backward()
            return loss

        held = []
        for _ in range(5):
            held.append(flat(model))
            optimizer.step(closure)
        handle.detach()
        first_of_each = seen[:: 2 + comm.rank]
        same = [torch.equal(*pair) for pair in zip(held, first_of_each, strict=True)]
        return handle._rounds.state.progress.step, len(seen), same

    for rank, (rounds, evaluations, same) in enumerate(tw.LocalWorld(SIZE).run(worker)):
        assert (rounds, evaluations) == (5, 5 * (2 + rank))
        assert all(same)  # gradients are those of the model that the user sees, not of push-sum's biased one


def test_plain_mean_leaves_equal_models():
    def worker(comm):
        return train(comm, tw.Mean(), 6, "sgd", order="adapt_then_combine")

    expected = Simulation(mixing(tw.Complete()), "sgd", order="adapt_then_combine").run(6)
    paths = tw.LocalWorld(SIZE).run(worker)
    for rank, path in enumerate(paths):
        assert torch.equal(path, paths[0])
        torch.testing.assert_close(path, expected[:, rank], rtol=0, atol=2e-5)


@every_averager
@pytest.mark.parametrize("mode", [{}, LATE], ids=str)
def test_a_lone_worker_trains_as_without(averager, mode):
    def worker(comm):
        path = train(comm, averager, 5, **mode)
        model = Bowl(0)
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        for _ in range(5):
            train_step(model, optimizer)
        return torch.equal(path[-1], flat(model))

    assert tw.LocalWorld(1).run(worker) == [True]


def test_half_precision_parameters_are_mixed_in_float32():
    def worker(comm):
        model = Bowl(comm.rank).to(torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for mode in ({}, {"overlap": True}):
            handle = tw.gossip_parameters(model, optimizer, tw.Mix(), comm=comm, **mode)
            model.matrix.data.fill_(1 + comm.rank)
            for _ in range(2):
                train_step(model, optimizer)
            handle.detach()
            assert model.matrix.dtype == torch.bfloat16
        return model.matrix[0, 0].item()

    assert tw.LocalWorld(2).run(worker) == [1.5, 1.5]


def test_a_round_that_was_saved_in_flight_is_absorbed_in_the_next_step_without_overlap():
    def worker(comm):
        model = Bowl(comm.rank)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        with tw.gossip_parameters(model, optimizer, tw.Mix(), comm=comm, overlap=True) as handle:
            train_step(model, optimizer)
            own, saved = copy.deepcopy(model.state_dict()), handle.state_dict()
        with tw.gossip_parameters(model, optimizer, tw.Mix(), comm=comm) as handle:
            model.load_state_dict(own)
            handle.load_state_dict(saved)
            train_step(model, optimizer)
            before = flat(model)
            handle.synchronize()
            return torch.equal(before, flat(model))

    assert tw.LocalWorld(2).run(worker) == [True, True]


def test_an_optimizer_of_something_else_is_refused():
    def worker(comm):
        model, other = Bowl(0), nn.Parameter(torch.zeros(2))
        for parameters, message in (([other], "nothing to average"), ([model.matrix, other], "1 of the optimizer's")):
            with pytest.raises(ValueError, match=message):
                tw.gossip_parameters(model, torch.optim.SGD(parameters), tw.Mix(), comm=comm)

    tw.LocalWorld(1).run(worker)


@pytest.mark.parametrize("order", ["combine_then_adapt", "adapt_then_combine"])
def test_a_step_that_is_interrupted_leaves_the_model_and_says_what_to_do(order):
    """The model holds z, not the x of push-sum in the middle of a step; there is no next round."""

    def worker(comm):
        model = Bowl(comm.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = tw.gossip_parameters(model, optimizer, tw.PushSum(DIRECTED), comm=comm, order=order)
        for _ in range(3):
            train_step(model, optimizer)
        before, weight = flat(model), handle._rounds.weight
        interrupt_once(comm, "exchange")
        with pytest.raises(KeyboardInterrupt):
            train_step(model, optimizer)
        updated = order == "adapt_then_combine"
        moved = torch.cat([p.grad.reshape(-1) for p in model.parameters()]) * (0.1 * updated)
        torch.testing.assert_close(flat(model), (before * weight - moved) / weight)
        with pytest.raises(ValueError, match="where an error broke it off, detach"):
            train_step(model, optimizer)
        with pytest.raises(ValueError, match="where an error broke it off, go on from an earlier checkpoint"):
            handle.state_dict()
        handle.detach()
        tw.gossip_parameters(model, optimizer, tw.PushSum(DIRECTED), comm=comm, order=order)
        train_step(model, optimizer)
        return weight

    assert any(abs(weight - 1) > 0.01 for weight in tw.LocalWorld(SIZE).run(worker))
