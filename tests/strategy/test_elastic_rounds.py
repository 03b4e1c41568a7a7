"""Strategies whose messages fly while workers come and go: against runs on fixed workers, and simulations in float64."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers.spawn import run_threads
from helpers.states import leaves
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import thinwire as tw
from thinwire.comm import CommunicationError, ElasticCommunicator, Lighthouse
from thinwire.comm.elastic.history import History
from thinwire.comm.members import LostRounds
from thinwire.strategy.local.fragments import offset

SIZES = (3, 4)  # of the layers
SECONDS = 60.0


class Quadratic(nn.Module):
    """The loss of a worker is 1/2 |x - its number|^2 over two layers, each rescaled by the step."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ParameterList([torch.linspace(-1, 1, n) for n in SIZES])

    def forward(self, number, step):
        return sum((1 + (step + i) % 3) * (x - number).square().sum() / 2 for i, x in enumerate(self.layers))


def gradient(x, number, step, layer):
    return (1 + (step + layer) % 3) * (x - number)


def vector(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.fixture
def elastic(monkeypatch):
    """Runs `fn(comm, number)` in a thread for each number, on elastic communicators; nobody closes before all have ended."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    places = []

    def run(fn, numbers, min_workers):
        places.append(Lighthouse(min_workers, "127.0.0.1"))
        ended = threading.Barrier(len(numbers))

        def worker(number):
            comm = ElasticCommunicator(
                places[-1].address, abs(number), min_workers, timeout_seconds=SECONDS, is_late=number < 0
            )
            try:
                return fn(comm, number)
            finally:
                ended.wait(SECONDS)
                comm.close()

        with ThreadPoolExecutor(len(numbers)) as pool:
            return list(pool.map(worker, numbers))

    yield run
    for place in places:
        place.close()


def train(comm, strategy, steps):
    model = Quadratic()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    handle = tw.attach(model, optimizer, tw.parse(strategy), comm=comm)
    for step in range(steps):
        if comm.is_elastic:
            handle.begin_round()
        optimizer.zero_grad()
        model(comm.rank, step).backward()
        optimizer.step()
    handle.settle()
    result = vector(model).clone()
    handle.detach()
    return result


@pytest.mark.parametrize(
    "strategy",
    [
        "Local(Mean(TopK(0.5), ErrorFeedback(), min_ndim=0), every=4, delay=2, alpha=0.5, outer=OuterSGD())",
        "Local(Mean(QSGD(bits=4), min_ndim=0), every=4, fragments=2, delay=3, alpha=0.5, outer=OuterSGD())",
        "Local(Mean(TopK(0.5), ErrorFeedback(), min_ndim=0), every=2, fragments=2, delay=1, outer=OuterSGD())",
        "Local(Mean(QSGD(bits=4), rule=MedianNorm(factor=1.1)), every=4, outer=OuterSGD())",
        "Local(Mix(Ring()), every=4, fragments=2, delay=1, alpha=0.5, outer=OuterSGD(), pull=0.3)",
        "Gossip(Mix(), overlap=True)",
        "Gossip(PushSum(), overlap=True, staleness=2, order='adapt_then_combine')",
    ],
)
def test_undisturbed_elastic_rounds_are_those_of_a_fixed_number_of_workers_bit_for_bit(strategy, elastic):
    expected = run_threads(3, train, strategy, 11)
    found = elastic(lambda comm, number: train(comm, strategy, 11), (0, 1, 2), 3)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert not torch.equal(found[0], found[1])


def test_elastic_workers_form_nodes(elastic):
    strategy = "Local(Mean(QSGD(bits=4), exchange='hierarchical', workers_per_node=2, min_ndim=0), every=2)"
    expected = run_threads(4, train, strategy, 4)
    found = elastic(lambda comm, number: train(comm, strategy, 4), range(4), 4)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_elastic_workers_average_the_states_that_all_have(elastic):
    """Worker 1 makes its states in the second step."""

    def train(comm, is_late):
        model = Quadratic()
        optimizer = torch.optim.Adafactor(model.parameters(), lr=0.05)
        strategy = tw.Local(tw.Mean(tw.QSGD(bits=4)), every=3, state_every={"variance": 1})
        handle = tw.attach(model, optimizer, strategy, comm=comm)
        states = []
        for step in range(4):
            if comm.is_elastic:
                handle.begin_round()
            optimizer.zero_grad()
            if step > 0 or not is_late:
                model(int(is_late), step).backward()
            optimizer.step()
            states.append([state["variance"].tolist() for state in optimizer.state.values()])
        handle.settle()
        handle.detach()
        return states

    expected = run_threads(2, lambda comm: train(comm, comm.rank == 1))
    found = elastic(lambda comm, number: train(comm, number == 1), (0, 1), 2)
    assert [len(states) for states in found[1]] == [0, *[len(found[0][0])] * 3]
    assert found == expected
    assert found[0][1:] == found[1][1:]


# ---- checkpoints on disks of their own ----


def test_workers_go_on_from_checkpoints_of_their_own_and_lose_no_round_without_an_error(elastic):
    """Workers 0 and 2 save after rounds 2 and 4, and worker 1 never. Later 0 and 1 have gone on apart, and meet worker 2."""
    saved = {}

    def work(comm, number, have, saves, rounds):
        model = Quadratic()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        handle = tw.attach(model, optimizer, "Gradients(Mean(TopK(0.5), ErrorFeedback(), min_ndim=0))", comm=comm)
        if number in have:
            comm.load_state_dict(have[number]["rounds"])
            model.load_state_dict(have[number]["model"])
            handle.load_state_dict(have[number]["strategy"])
        all_live.wait(SECONDS)
        handle.begin_round()
        began = comm.counts.committed, vector(model).clone(), handle._state.memory.residual["layers.0"].clone()
        while comm.counts.committed < rounds:
            optimizer.zero_grad()
            model(number, comm.counts.committed).backward()
            optimizer.step()
            if saves.get(number) == comm.counts.committed:
                states = {"rounds": comm.state_dict(), "strategy": handle.state_dict(), "model": model.state_dict()}
                saved[number] = copy.deepcopy(states)
        handle.detach()
        return began

    all_live = threading.Barrier(3)
    elastic(lambda comm, number: work(comm, number, {}, {0: 2, 2: 4}, 4), (0, 1, 2), 3)
    found = elastic(lambda comm, number: work(comm, number, saved, {}, 0), (0, 1, 2), 3)
    newest = torch.cat([saved[2]["model"][f"layers.{i}"] for i in range(2)])
    assert all(committed == 4 and torch.equal(model, newest) for committed, model, _ in found)
    (strategy,) = saved[2]["strategy"].values()
    residual = strategy["memory"]["residual"]["layers.0"]
    assert torch.equal(found[2][2], residual) and residual.any() and not found[0][2].any()

    apart = History(2, saved[0]["rounds"]["digests"])
    for _ in range(5):
        apart.commit("apart")
    went_on = saved[0] | {"rounds": {"rounds": 7, "digests": apart.digests}}

    def meet(comm, number):
        try:
            return work(comm, number, {0: went_on, 1: went_on, 2: saved[2]}, {}, 0)[0]
        except LostRounds as error:
            return str(error)

    *others, refused = elastic(meet, (0, 1, 2), 2)
    assert others == [7, 7]
    assert "worker 2 has committed 2 rounds since round 2 that the newest state, that of worker 0 after 7" in refused


@pytest.mark.parametrize(("every", "left_out"), [(10, 5), (4, 3)])
def test_a_joiner_comes_to_the_exchange_before_the_others(every, left_out, elastic):
    """They have taken three steps when it has their state. It leaves out these and two more, but takes one at least.

    Its learning-rate scheduler, of which it gets the state of the round's begin, takes these steps too, once.
    """
    taken, told = threading.Barrier(3), threading.Barrier(3)

    def worker(comm, number):
        def finish_healing():
            taken.wait(SECONDS)
            steps = finish()
            told.wait(SECONDS)
            return steps

        model = Quadratic()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        handle = tw.attach(model, optimizer, f"Local(Mean(), every={every})", comm=comm)
        comm.share("scheduler", scheduler.state_dict, scheduler.load_state_dict)
        if number < 2:
            comm.load_state_dict({"rounds": 5})
        else:
            finish, comm.finish_healing = comm.finish_healing, finish_healing
        steps = skipped = 0
        while comm.counts.committed < 6:
            handle.begin_round()
            left_now = comm.num_skipped
            skipped += left_now
            optimizer.zero_grad()
            model(number, steps).backward()
            optimizer.step()
            for _ in range(1 + left_now):
                scheduler.step()
            steps += 1
            if number < 2 and steps == 3:
                taken.wait(SECONDS)
                told.wait(SECONDS)
        return steps, skipped, scheduler.last_epoch, vector(model).tolist()

    *others, joiner = elastic(worker, (0, 1, 2), 3)
    assert joiner[:2] == (every - left_out, left_out)
    assert all(one == (every, 0, *joiner[2:]) for one in others)


# ---- a worker dies while its messages fly ----

STEPS, DIES, EVERY, ALPHA = 14, 5, 4, 0.5


def simulate(delay, returns, flies):
    """Two fragments of plain averaging by hand in float64. Worker 2 does not vote on the exchange that begins at step `DIES`.

    The others repeat that exchange, where it was to end: without worker 2, or with another one that has no changes yet. If no
    messages fly when it dies, that one comes before the exchange.
    """
    x = [[torch.linspace(-1, 1, n).double() for n in SIZES] for _ in range(3)]
    anchors, living, flying = [t.clone() for t in x[0]], [0, 1, 2], {}

    def merge(layer, workers):
        anchors[layer] = anchors[layer] - flying.pop(layer)
        for i in workers:
            x[i][layer] = ALPHA * x[i][layer] + (1 - ALPHA) * anchors[layer]

    ends = DIES + flies * min(delay, EVERY // 2)  # or when the next exchange begins
    for step in range(STEPS):
        position = step % EVERY + 1
        if flies and step == DIES + (delay > 0):
            living = [0, 1]
        for i in living:
            x[i] = [p - 0.05 * gradient(p, i, step, layer) for layer, p in enumerate(x[i])]
        if returns and step == ends:
            x[2], living = [t.clone() for t in anchors], [0, 1, 2]

        for layer in list(flying):
            if (position - offset(layer, 2, EVERY)) % EVERY == delay:
                merge(layer, living)
        for layer in (0, 1):
            if position == offset(layer, 2, EVERY):
                size = 3 if step < DIES or returns else 2
                senders = [i for i in living if i < 2 or step != DIES or not delay]
                flying[layer] = sum(anchors[layer] - x[i][layer] for i in senders) / size
                if not delay:
                    merge(layer, living)
    return torch.stack([torch.cat(x[i]) for i in living])


@pytest.mark.parametrize(
    ("delay", "returns", "flies"),
    [(0, True, True), (1, False, True), (3, True, True), (3, True, False)],
)
def test_local_updates_send_again_what_was_in_flight_when_a_worker_died(delay, returns, flies, elastic):
    """With a delay of 3 steps exchanges overlap: where no messages fly, a result waits to be merged, and the joiner gets it."""
    strategy = f"Local(Mean(), every={EVERY}, fragments=2, delay={delay}, alpha={ALPHA})"
    unmerged, committed, closed = [], threading.Barrier(3), threading.Barrier(2 + returns)
    dies = DIES + (delay > 0)

    def train_until(comm, number, num_steps):
        model = Quadratic()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        handle = tw.attach(model, optimizer, strategy, comm=comm)
        while handle._record.num_steps < num_steps:
            handle.begin_round()
            if comm.number == 3:  # it has joined
                unmerged.append([fragment.finite for fragment in handle._record.fragments])
            optimizer.zero_grad()
            model(number, handle._record.num_steps).backward()
            optimizer.step()
            if not flies and comm.number < 3 and handle._record.num_steps == dies:
                committed.wait(SECONDS)  # a worker that hangs up right after its own vote can end that of others
        if num_steps == STEPS:
            closed.wait(SECONDS)
        return vector(model), handle

    def worker(comm, number):
        if number < 2:
            return train_until(comm, number, STEPS)[0]
        _, dying = train_until(comm, number, dies)
        if flies:
            dying.begin_round()
        assert comm.in_round == flies
        comm._groups.hang_up()
        comm.close()
        if not returns:
            return dying
        with ElasticCommunicator(comm._forming._lighthouse, 3, 3, timeout_seconds=SECONDS, is_late=True) as again:
            result, _ = train_until(again, number, STEPS)
            assert again.counts.healings == 1
            return result

    found = elastic(worker, (0, 1, 2), 2 + returns)
    for i, expected in enumerate(simulate(delay, returns, flies)):
        assert torch.allclose(found[i].double(), expected, rtol=0, atol=1e-5), i
    assert not returns or (True in unmerged[0]) == (not flies)


def test_gossip_drops_what_was_in_flight_when_a_worker_died(elastic):
    """Worker 2 dies when its messages fly. For the others this round leaves no trace, and the next ones are of two workers."""

    def worker(comm, number):
        model = Quadratic()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        handle = tw.attach(model, optimizer, tw.Gossip(tw.Mix(tw.Ring()), overlap=True), comm=comm)
        for step in range(STEPS):
            handle.begin_round()
            if number == 2 and step == DIES:
                assert handle._rounds.is_undecided
                with pytest.raises(
                    ValueError, match="messages of an elastic round are under way, which may be given up"
                ):
                    handle.state_dict()
                comm._groups.hang_up()
                comm.close()
                return handle
            optimizer.zero_grad()
            model(number, step).backward()
            optimizer.step()
        result = vector(model).clone()
        closed.wait(SECONDS)
        return result

    closed = threading.Barrier(2)
    x = [torch.cat([torch.linspace(-1, 1, n).double() for n in SIZES])] * 3
    for step in range(STEPS):
        x = x[:2] if step == DIES else x
        parts = [torch.split(one, SIZES) for one in x]
        moves = [
            torch.cat([0.05 * gradient(p, i, step, n) for n, p in enumerate(part)]) for i, part in enumerate(parts)
        ]
        mixed = x if step in (0, DIES) else [sum(x) / len(x)] * len(x)
        x = [one - move for one, move in zip(mixed, moves, strict=True)]
    found = elastic(worker, (0, 1, 2), 2)
    for result, expected in zip(found, x, strict=False):
        assert torch.allclose(result.double(), expected, rtol=0, atol=1e-5)


def in_a_lost_round(elastic, strategy, taken):
    """Worker 2 hangs up where the others begin their messages; they go on as two.

    Args:
        strategy: in the notation.
        taken: whether the others take that step of the optimizer, by their own gradients.

    Returns:
        Of each that is left: whether its parameters are others, which tensors of its state have changed, whether others are
        there; at the end the number of workers, of skipped steps, and the model.
    """

    def worker(comm, number):
        model = Quadratic()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        handle = tw.attach(model, optimizer, strategy, comm=comm)
        for step in range(STEPS):
            handle.begin_round()
            if number == 2 and step == DIES:
                comm._groups.hang_up()
                comm.close()
                return handle
            if step == DIES:
                parameters, before = copy.deepcopy(list(model.parameters())), leaves(handle.state_dict())
            optimizer.zero_grad()
            model(number, step).backward()
            if step == DIES and taken:
                for copied, p in zip(parameters, model.parameters(), strict=True):
                    copied.data.add_(p.grad, alpha=-0.05)
            optimizer.step()
            if step == DIES:
                after = leaves(handle.state_dict())
                changed = [name for name, value in before.items() if not torch.equal(after[name], value)]
                moved = not all(map(torch.equal, parameters, model.parameters()))
                trace = moved, changed, list(before) != list(after)
        closed.wait(SECONDS)
        return trace, comm.size, handle.num_skipped, vector(model).tolist()

    closed = threading.Barrier(2)
    return elastic(worker, (0, 1, 2), 2)[:2]


@pytest.mark.parametrize(
    "strategy",
    [
        "Gossip(Mix(Ring()))",
        "Gossip(PushSum(Exponential()))",
        "Gossip(Choco(Ring(), TopK(0.5), step_size=0.5))",
        "Gossip(DeepSqueeze(Ring(), QSGD(bits=4), step_size=0.5))",
        "Gossip(Moniqua(Ring(), theta=4.0, step_size=0.5))",
        "Gossip(PowerGossip(Ring(), rank=1))",
    ],
)
def test_a_gossip_round_in_which_a_worker_dies_leaves_no_trace(strategy, elastic):
    """The others take this step as if there had been no round."""
    for trace, *counts, _ in in_a_lost_round(elastic, strategy, taken=True):
        assert trace == (False, [], False) and counts == [2, 0]


@pytest.mark.parametrize(
    "averager",
    [
        "Mix(Ring())",
        "PushSum(Exponential())",
        "Choco(Ring(), QSGD(bits=8), step_size=0.3)",
        "DeepSqueeze(Ring(), QSGD(bits=8), step_size=0.3)",
    ],
)
def test_an_overlapped_gossip_round_that_cannot_begin_on_one_worker_is_given_up_by_all(averager, elastic):
    """Without gradients workers only mix, so their mean stays, unless one has mixed and another has not."""

    def worker(comm, number):
        model = Quadratic()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        handle = tw.attach(model, optimizer, f"Gossip({averager}, overlap=True)", comm=comm)
        exchange = comm.exchange
        for step in range(STEPS):
            if step == DIES and number == 0:
                comm.exchange = broken
            handle.begin_round()
            comm.exchange = exchange
            if step == 0:
                for p in model.parameters():
                    p.data.add_(number)
            model(number, step).backward()
            optimizer.step()
        return comm.counts.aborted, comm.size, vector(model)

    def broken(*messages):
        raise CommunicationError("the line is cut")

    found = elastic(worker, (0, 1, 2), 3)
    assert [counts for *counts, _ in found] == [[1, 3]] * 3
    start = torch.cat([torch.linspace(-1, 1, n) for n in SIZES])
    torch.testing.assert_close(torch.stack([x for *_, x in found]).mean(0), start + 1, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "averager",
    [
        "TopK(0.5), ErrorFeedback(), min_ndim=0",
        "TopK(0.5), ErrorFeedback(), min_ndim=0, exchange='sparse_reduce'",
        "QSGD(bits=4), EF21(), min_ndim=0, exchange='scatter_reduce'",
        "TopK(0.5), MomentumCorrection(), min_ndim=0",
    ],
)
def test_a_round_of_gradients_in_which_a_worker_dies_is_a_step_that_nobody_takes(averager, elastic):
    """With two buckets, of which the second one is not sent."""
    first, second = in_a_lost_round(elastic, f"Gradients(Mean({averager}), bucket_bytes=1)", taken=False)
    assert first == second and first[:3] == ((False, [], False), 2, 0)


# ---- DistributedDataParallel ----


@pytest.fixture
def alone():
    """The default process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    # PyTorch keeps one for the whole process. Threads whose forwards overlap leave one of theirs there, and torch.compile
    # would split later models into its buckets.
    DistributedDataParallel._active_ddp_module = None


def test_workers_in_ddp_come_and_go_though_each_makes_buckets_of_its_own(alone, elastic):
    """The third joins when the others have rebuilt their buckets in the order of the gradients, which it has not."""

    def worker(comm, number):
        torch.manual_seed(number)
        model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 10))
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        if number < 0:
            trained.wait(SECONDS)
        averager = tw.Mean(tw.chain(tw.TopK(0.2), tw.QSGD(bits=4)), tw.ErrorFeedback())
        with tw.compress_gradients(ddp, averager, comm=comm) as handle:
            together = 0
            while together < 4:
                handle.begin_round()
                optimizer.zero_grad()
                ddp(torch.randn(8, 20)).square().mean().backward()
                optimizer.step()
                together += comm.size == 3
                if comm.counts.committed == 3:
                    trained.set()
            sums = vector(model).double().sum().item()
            closed.wait(SECONDS)
        return sums, comm.counts.healings

    trained, closed = threading.Event(), threading.Barrier(3)
    (a, _), (b, _), (c, healings) = elastic(worker, (0, 1, -2), 2)
    assert a == b == c and healings == 1


# ---- what is refused when it is built ----


def test_strategies_that_need_a_fixed_number_of_workers_say_so_when_they_are_attached(alone, elastic):
    from torch.distributed.fsdp import fully_shard  # takes seconds, which the other tests need not wait for

    def worker(comm, number):
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        refused = "needs a fixed number of workers; leave the elastic communicator out"
        with pytest.raises(ValueError, match=rf"Asynchronous: Asynchronous\(\) {refused}"):
            tw.gossip_asynchronously(model, optimizer, comm=comm)
        with pytest.raises(ValueError, match=rf"Local: Local\(.*quorum=Quorum\(\)\) {refused}"):
            tw.attach(model, optimizer, "Local(Mean(), 2, quorum=Quorum())", comm=comm)
        sharded = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(ValueError, match=r"'weight' is a DTensor over the processes \[0\], .*replica=mesh\)"):
            tw.compress_gradients(sharded, comm=comm)
        ddp = DistributedDataParallel(model)
        ddp.process_group = SimpleNamespace(size=lambda: 2)
        for text in ("Gradients(Mean())", "Local(Mean(), every=2)"):
            with pytest.raises(
                ValueError, match="connects 2 processes, which cannot come and go; pass the plain module"
            ):
                tw.attach(ddp, optimizer, text, comm=comm)

    elastic(worker, (0,), 1)


def test_a_copy_of_an_elastic_model_takes_no_part(elastic):
    """Such as that of `torch.optim.swa_utils.AveragedModel`."""

    def worker(comm, number):
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with tw.attach(model, optimizer, "Local(Mean(), 2)", comm=comm):
            average = AveragedModel(model)
            average(torch.ones(2))
            assert not comm.in_round
            model(torch.ones(2)).sum().backward()
            assert comm.in_round
            optimizer.step()

    elastic(worker, (0,), 1)


def test_an_elastic_communicator_carries_one_strategy_at_a_time(elastic):
    def worker(comm, number):
        models = [nn.Linear(2, 2), nn.Linear(2, 2)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        first = tw.attach(models[0], optimizers[0], "Local(Mean(), 2)", comm=comm)
        with pytest.raises(
            ValueError, match=r"Gossip: Local\(Mean\(\), every=2\) averages over this elastic communicator, "
        ):
            tw.attach(models[1], optimizers[1], "Gossip(Mean())", comm=comm)
        first.detach()
        tw.attach(models[1], optimizers[1], "Gossip(Mean())", comm=comm).detach()
        assert not comm._healing.shared  # what a joiner would get

    elastic(worker, (0,), 1)


def test_a_sampler_of_the_next_strategy_goes_on_where_that_of_the_one_before_ended(elastic):
    """It could not be made, and the first one weighted blocks as for gradients. Three blocks of two workers are a step."""

    def worker(comm, number):
        model, blocks, sampler = Quadratic(), [], None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for strategy, weights in (("Gradients(Mean())", (4 / 3, 2 / 3)), ("Local(Mean(), every=2)", (1.0, 1.0))):
            handle = tw.attach(model, optimizer, strategy, comm=comm)
            before, sampler = sampler, tw.ElasticSampler(12, handle, per_step=3)
            if before is not None:
                with pytest.raises(ValueError, match=r"ElasticSampler: its strategy was detached; make another one"):
                    before.take()
                sampler.load_state_dict(before.state_dict())
            for _ in range(2):
                handle.begin_round()
                blocks += sampler.take()
                assert sampler.weight == pytest.approx(weights[number])
                optimizer.zero_grad()
                model(comm.rank, 0).backward()
                optimizer.step()
            handle.detach()
        return blocks, sampler.epoch

    found = elastic(worker, (0, 1), 2)
    assert sorted(block.number for blocks, _ in found for block in blocks) == list(range(12))
    assert [epoch for _, epoch in found] == [1, 1]
