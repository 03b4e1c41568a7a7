"""AD-PSGD: the mean is kept, workers agree, nobody waits for a slow one, and nothing hangs however it ends."""

from __future__ import annotations

import io
import os
import random
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from helpers.program import programs
from helpers.spawn import WORLDS, run_threads, spawn
from torch import nn

import thinwire as tw
from thinwire.average import PairwiseState
from thinwire.average.gossip.layout import FlatLayout
from thinwire.comm import CommunicationError
from thinwire.strategy.gossip.pairwise_exchange import MAX_REASON_BYTES, PairMessage, PairwiseExchange

SHAPE = (6, 4)
N = 24


def value(*key, shape=SHAPE):
    return torch.randn(shape, generator=torch.Generator().manual_seed(hash(key) % 2**31))


class Worker:
    """A model of one matrix, whose gradients are given: `step` subtracts `change`."""

    def __init__(self, comm, averager=None, saved=None):
        self.comm, self.model = comm, nn.Linear(SHAPE[1], SHAPE[0], bias=False)
        with torch.no_grad():
            self.model.weight.fill_(1.0)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.handle = tw.gossip_asynchronously(self.model, self.optimizer, averager, comm=comm)
        if saved is not None:
            self.model.load_state_dict(saved["model"])
            self.handle.load_state_dict(saved["handle"])

    def step(self, change, seconds=0.0):
        """The wait lies between forward and backward, where averaging must not touch the parameters."""
        loss = (self.model.weight * change).square().sum() * 0 + (self.model.weight * change).sum()
        time.sleep(seconds)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    @property
    def weight(self):
        return self.model.weight.detach().clone()


# ---- a partner that lies ----


def test_a_partner_that_asks_again_before_it_has_its_answer_is_named():
    """What it sends would wait in memory, any number of times, until this worker makes a step."""

    def worker(comm):
        averager = tw.average.Pairwise()
        state = averager.init([("w", torch.zeros(8))], comm)
        if comm.rank == 0:
            exchange = PairwiseExchange(averager, state, comm)
            with pytest.raises(
                CommunicationError, match="rank 1 sent a message of kind 1 and 32 bytes that does not belong"
            ):
                exchange.finish()
            comm.barrier()
            exchange.close()
        else:
            channel = comm.open_channel([0], MAX_REASON_BYTES)
            for _ in range(2):
                channel.send(0, PairMessage.ASK, torch.zeros(8))
            assert channel.receive([0]).kind == PairMessage.FAILURE
            comm.barrier()
            channel.close()

    tw.LocalWorld(2).run(worker)


def sends_to_one_that_has_gone(comm):
    """Worker 1 chooses its partner before that one fails, and sends after it has hung up."""
    chosen, go_on = threading.Event(), threading.Event()

    class Slow(tw.Pairwise):
        def peer(self, rank, index, size):
            chosen.set()
            go_on.wait()
            return 0

    averager = Slow()
    state = averager.init([("w", torch.zeros(8))], comm)
    if comm.rank == 0:
        channel = comm.open_channel([1], MAX_REASON_BYTES)
        comm.barrier()
        channel.send(1, PairMessage.FAILURE, torch.tensor(list(b"rank 7 raised ValueError"), dtype=torch.uint8))
        channel.close()
        comm.barrier()
        return None
    state.publish([("w", torch.zeros(8))])
    exchange = PairwiseExchange(averager, state, comm)
    exchange.after_step()
    chosen.wait()
    comm.barrier()
    comm.barrier()
    time.sleep(0.1)  # for the engine to hear of it
    go_on.set()
    with pytest.raises(CommunicationError) as caught:
        exchange.finish()
    exchange.close()
    return str(caught.value)


def test_why_a_partner_has_gone_is_read_even_if_sending_to_it_fails_first():
    results = spawn(2, sends_to_one_that_has_gone)
    assert results[1] == "rank 1: asynchronous averaging has stopped: rank 7 raised ValueError"


# ---- what the algorithm promises ----


def step_until_averaged(worker, num):
    """Steps without gradients, which change nothing but have the worker average, until it has done so `num` times more.

    Tests count averagings and not steps or seconds, because a busy machine may delay any thread by many steps.
    """
    until = worker.handle.num_averaged + num
    while worker.handle.num_averaged < until:
        time.sleep(0.001)
        worker.optimizer.zero_grad()
        worker.optimizer.step()


def without_gradients(comm, num):
    worker = Worker(comm)
    with torch.no_grad():
        worker.model.weight.copy_(value(comm.rank))
    worker.optimizer.step()  # publishes it
    step_until_averaged(worker, num)
    worker.handle.detach()
    return worker.weight, worker.handle.num_averaged


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("size", [2, 6])
def test_without_gradients_workers_agree_on_the_mean(world, size):
    results = WORLDS[world](size, without_gradients, 40)
    x = torch.stack([weight for weight, _ in results]).double()
    mean = torch.stack([value(rank) for rank in range(size)]).double().mean(0)
    assert torch.allclose(x.mean(0), mean, rtol=0, atol=1e-5)  # some hundred additions, each rounded at 1e-7
    assert (x - mean).abs().max() < 1e-3
    assert sum(count for _, count in results) % 2 == 0  # every averaging has changed two workers


def with_gradients(comm, seed, steps):
    """As many steps as `steps` says for each rank, of random length."""
    worker, draw = Worker(comm), random.Random(seed + comm.rank)
    for step in range(steps[comm.rank]):
        worker.step(value(seed, comm.rank, step), draw.random() ** 4 * 0.01)
    if comm.size > 1:
        step_until_averaged(worker, 20)
    worker.handle.synchronize()
    weight = worker.weight
    worker.handle.detach()
    return weight, worker.handle.num_averaged


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("seed", range(2))
def test_the_mean_moves_by_all_steps_and_nothing_else(world, seed):
    """Steps with random sleeps, unequally many on unequal workers."""
    steps = [100, 75, 100, 50]
    results = WORLDS[world](4, with_gradients, seed, steps)
    changes = sum(value(seed, rank, step).double() for rank, count in enumerate(steps) for step in range(count))
    x = torch.stack([weight for weight, _ in results]).double()
    assert torch.allclose(x.mean(0), 1.0 - changes / 4, rtol=0, atol=1e-3)  # values near 20, some 1000 additions
    alone = torch.stack([sum(value(seed, r, s).double() for s in range(n)) for r, n in enumerate(steps)])
    assert (x - x.mean(0)).norm() < 0.8 * (alone - alone.mean(0)).norm()  # without averaging they would be apart
    assert all(count >= 20 for _, count in results)


def one_is_slow(comm, slow, folder):
    """The slow worker's fifth step takes until all others have made their last."""
    worker, done = Worker(comm), [folder / f"done-{rank}" for rank in range(comm.size) if rank != slow]
    for step in range(40):
        worker.step(value(comm.rank, step))
        if comm.rank == slow and step == 5:
            while not all(file.exists() for file in done):
                time.sleep(0.001)
    if comm.rank != slow:
        (folder / f"done-{comm.rank}").touch()
    else:
        step_until_averaged(worker, 5)  # the others answer and ask while they wait in `detach`
    worker.handle.detach()
    return worker.handle.num_averaged


@pytest.mark.parametrize("slow", [0, 1])
def test_nobody_waits_for_a_slow_worker_and_those_who_are_done_go_on_averaging(slow, tmp_path):
    """If one waited for the slow worker's steps, or did not average after its own, the processes would never end."""
    assert spawn(4, one_is_slow, slow, tmp_path)[slow] >= 5


# ---- two workers, by hand ----


def state_of(x):
    state = PairwiseState(FlatLayout.of([("x", x)]), torch.zeros(x.numel()))
    state.publish([("x", x)])
    return state


def test_an_averaging_with_steps_in_between_is_that_of_the_moment_of_the_answer():
    x, y = value(1, shape=N), value(2, shape=N)
    before, active, passive = x.double() + y.double(), state_of(x), state_of(y)
    sent = active.ask()
    x -= 0.25  # a step of the active worker, before it hears the answer
    active.publish([("x", x)])
    answer = passive.answer(sent)
    active.absorb(sent, answer)
    assert torch.equal(active.changes, -passive.changes)
    active.publish([("x", x)])
    passive.publish([("x", y)])
    assert torch.allclose(x.double(), before / 2 - 0.25, rtol=0, atol=1e-6)
    assert torch.allclose(y.double(), before / 2, rtol=0, atol=1e-6)
    assert not active.changes.any()


def test_no_averaging_waits_for_a_gpu_that_is_behind(monkeypatch):
    """`publish` copies parameters that a GPU may have yet to compute."""
    state, copying, computed, cpu = state_of(value(1, shape=N)), threading.Event(), threading.Event(), torch.Tensor.cpu

    def late(t):
        copying.set()
        assert computed.wait(60)
        return cpu(t)

    monkeypatch.setattr(torch.Tensor, "cpu", late)
    with ThreadPoolExecutor(2) as threads:
        published = threads.submit(state.publish, [("x", value(2, shape=N))])
        try:
            assert copying.wait(60)
            assert torch.equal(threads.submit(state.ask).result(50), value(1, shape=N))
        finally:
            computed.set()
        published.result(60)
    assert torch.equal(state.ask(), value(2, shape=N))


def test_half_precision_keeps_what_it_cannot_hold():
    x, y = torch.full((3,), 1.0, dtype=torch.bfloat16), torch.full((3,), 1.0 + 2**-7, dtype=torch.bfloat16)
    active, passive = state_of(x), state_of(y)
    sent = active.ask()
    active.absorb(sent, passive.answer(sent))
    active.publish([("x", x)])
    assert torch.equal(active.published + active.changes, torch.full((3,), 1.0 + 2**-8))


def test_what_is_not_finite_is_not_remembered():
    x = torch.zeros(2)
    state = state_of(x)
    state.answer(torch.tensor([float("inf"), float("nan")]))
    state.publish([("x", x)])
    assert not torch.isfinite(x).any()
    assert torch.isfinite(state.changes).all()
    x.fill_(1.0)  # restored
    state.publish([("x", x)])
    assert torch.equal(state.ask(), torch.ones(2))


# ---- the handle ----


def measured(comm):
    worker = Worker(comm)
    worker.model.register_buffer("statistic", torch.tensor(float(comm.rank)))
    worker.step(value(comm.rank))
    worker.handle.synchronize()
    weight, distance = worker.weight, worker.handle.consensus_distance()
    with worker.handle.average_model():
        mean, statistic = worker.weight, worker.model.statistic.item()
        with pytest.raises(ValueError, match=r"optimizer.step\(\) inside average_model\(\)"):
            worker.optimizer.step()
    again = worker.weight
    worker.handle.detach()
    worker.handle.detach()  # once more does nothing
    return weight, distance, mean, statistic, again, worker.handle.seconds


@pytest.mark.parametrize("world", WORLDS)
def test_distance_and_mean_model(world):
    results = WORLDS[world](4, measured)
    x = torch.stack([weight for weight, *_ in results]).double()
    for weight, distance, mean, statistic, again, seconds in results:
        assert distance == pytest.approx(((x - x.mean(0)).square().sum() / 4).sqrt().item(), rel=1e-5)
        assert torch.allclose(mean.double(), x.mean(0), rtol=0, atol=1e-6)
        assert statistic == 1.5
        assert not torch.equal(weight, mean)
        assert {"publish", "wait"} <= seconds.keys()
        del again  # the step inside the context went the way of the mean


def counted(comm):
    worker = Worker(comm)
    step_until_averaged(worker, 6)
    dense = worker.handle.ledger.as_dict()["dense_fp32_bytes"]
    worker.step(value(comm.rank))
    assert worker.handle.ledger.as_dict()["dense_fp32_bytes"] - dense == 2 * 3 * 4 * N // 4
    worker.handle.detach()
    return worker.handle.ledger.as_dict(), worker.handle.num_averaged


def test_the_ledger_counts_it_all():
    """Per averaging one message of 4n + 9 bytes from each; at the end 9 to each partner, from active workers twice."""
    results = run_threads(4, counted)
    for rank, (ledger, averaged) in enumerate(results):
        channel, last_words = ledger["collectives"]["channel"], 4 if rank % 2 else 2
        assert channel["messages"] == averaged + last_words
        assert channel["bytes_sent"] == averaged * (4 * N + 9) + 9 * last_words
        assert channel["bytes_received"] == averaged * (4 * N + 9) + 9 * (2 if rank % 2 else 4)
        assert averaged >= 6


def through_a_file(saved):
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def interrupted(comm):
    """All save after `synchronize`, and nobody steps before all have."""
    first = Worker(comm)
    for step in range(30):
        first.step(value(comm.rank, step), 0.001)
    step_until_averaged(first, 1)
    first.handle.synchronize()
    saved = through_a_file({"model": first.model.state_dict(), "handle": first.handle.state_dict()})
    comm.barrier()
    first.handle.detach()
    second = Worker(comm, saved=saved)
    for step in range(30, 60):
        second.step(value(comm.rank, step), 0.001)
    step_until_averaged(second, 1)
    second.handle.detach()
    state = saved["handle"][f"rank{comm.rank}"]
    return second.weight, list(state["changes"]), state["averaged"], second.handle.num_averaged


@pytest.mark.parametrize("world", WORLDS)
def test_a_resumed_run_keeps_the_mean(world):
    results = WORLDS[world](4, interrupted)
    changes = sum(value(rank, step).double() for rank in range(4) for step in range(60))
    x = torch.stack([weight for weight, *_ in results]).double()
    assert torch.allclose(x.mean(0), 1.0 - changes / 4, rtol=0, atol=1e-3)
    for _, names, before, after in results:
        assert names == ["weight"]
        assert after > before > 0


def saves_while_averaging(comm):
    """Every averaging that was begun has been absorbed by the time of saving."""
    worker = Worker(comm)
    for step in range(50):
        worker.step(value(comm.rank, step))
        if step % 5 == 0:
            state = worker.handle.state_dict()[f"rank{comm.rank}"]
            assert comm.rank % 2 == 0 or state["asked"] == state["averaged"]
            step_until_averaged(worker, 1)
    worker.handle.detach()
    return state


def test_a_saved_state_has_nothing_in_flight():
    assert all(state["averaged"] > 5 for state in run_threads(4, saves_while_averaging))


def loads_between_steps(comm):
    """The active worker loads between a step and its message, the passive one when a message has come."""
    worker = Worker(comm)
    state = worker.handle._state
    step_until_averaged(worker, 1)
    saved = worker.handle.state_dict()
    if comm.rank == 1:
        with worker.handle._exchange.settled():
            worker.step(torch.zeros(SHAPE))
            worker.handle.load_state_dict(saved)
    else:
        answer = state.answer

        def loaded_meanwhile(theirs):
            state.answer = answer
            state.load_state_dict(state.state_dict())
            return answer(theirs)

        state.answer = loaded_meanwhile
    step_until_averaged(worker, 3)
    worker.handle.detach()
    return worker.weight


def test_a_state_may_be_loaded_while_partners_ask():
    first, second = run_threads(2, loads_between_steps)
    assert torch.equal(first, torch.ones(SHAPE)) and torch.equal(second, first)


def trains_with_adam(comm):
    """Parts of one regression; float32 model with two layers, ordinary loop."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    handle = tw.gossip_asynchronously(model, optimizer, tw.Pairwise(tw.topology.BipartiteLinear()), comm=comm)
    generator, losses = torch.Generator().manual_seed(comm.rank), []
    for _ in range(200):
        x = torch.randn(32, 4, generator=generator)
        loss = (model(x).squeeze(1) - x.prod(1)).square().mean() + (model(x).squeeze(1) - x[:, 0]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    handle.synchronize()
    distance = handle.consensus_distance()
    handle.detach()
    return sum(losses[:10]), sum(losses[-10:]), distance


def test_an_ordinary_model_trains_in_processes():
    for first, last, distance in spawn(4, trains_with_adam):
        assert last < 0.85 * first
        assert distance < 2.0


# ---- how it ends ----


def ends_badly(comm, how, who):
    """All but `who` train until something happens to them."""
    if how == "stopped":
        store = dist.distributed_c10d._get_default_store()
        comm.barrier()  # everyone has started; from here on 3 seconds are enough
        comm = tw.comm.ProcessGroupCommunicator(timeout_seconds=3)
    worker = Worker(comm)
    comm.barrier()
    began = time.monotonic()
    try:
        for step in range(10_000):
            worker.step(value(0), 0.002)
            if comm.rank == who and step == 20:
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if how == "stopped":
                    store.set("stopped", str(os.getpid()))
                    os.kill(os.getpid(), signal.SIGSTOP)
                if how == "raises":
                    raise ValueError("the loss is NaN")
                if how == "leaves":
                    return None
    except tw.comm.CommunicationError as error:
        if how == "stopped" and store.add("failed", 1) == comm.size - 1:
            os.kill(int(store.get("stopped")), signal.SIGCONT)  # for the test to end
        return str(error), time.monotonic() - began
    finally:
        if how != "leaves" or comm.rank != who:
            worker.handle.detach()
    return None


@pytest.mark.parametrize("how, who", [("killed", 0), ("killed", 1), ("stopped", 1), ("raises", 0)])
def test_a_failing_process_stops_the_others_who_name_it(how, who):
    results = spawn(4, ends_badly, how, who, comm_timeout_seconds=600, return_errors=True)
    for rank, result in enumerate(results):
        if rank != who:
            assert isinstance(result, tuple), result
            text, seconds = result
            assert text.startswith(f"rank {rank}: asynchronous averaging has stopped: ")
            assert f"rank {who}" in text.split(": ", 2)[2]
            assert seconds < 300, result  # less than the communicator's timeout of 600; a busy machine needs some
    if how == "raises":
        assert str(results[who]) == "the loss is NaN"
        assert all(
            "ValueError('the loss is NaN')" in text for text, _ in (r for i, r in enumerate(results) if i != who)
        )


@pytest.mark.parametrize("who", [0, 1])
def test_a_failing_thread_stops_the_others(who):
    with pytest.raises((ValueError, tw.comm.CommunicationError), match="the loss is NaN"):
        run_threads(4, ends_badly_in_a_thread, "raises", who)


def ends_badly_in_a_thread(comm, how, who):
    result = ends_badly(comm, how, who)
    assert comm.rank == who or f"rank {who}" in result[0]


@pytest.mark.parametrize("world", WORLDS)
def test_one_that_leaves_without_detaching_is_an_error_to_the_others(world):
    results = WORLDS[world](2, ends_badly, "leaves", 1) if world == "threads" else spawn(2, leaves_the_process, 1)
    assert "rank 1 has hung up" in results[0][0]


def leaves_the_process(comm, who):
    result = ends_badly(comm, "leaves", who)
    if comm.rank == who:
        # The test's parent keeps processes until all are done; hang up as the end of a process would.
        import gc

        for channel in [o for o in gc.get_objects() if type(o).__name__ == "TcpChannel"]:
            channel.close()
    return result


def trains_until_interrupted(rank, store, phase):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = tw.gossip_asynchronously(model, optimizer)
    try:
        for step in range(10 if rank == 1 and phase == "waiting" else 100_000):
            optimizer.step()
            time.sleep(0.001)
            if step == 9:
                print("ready", flush=True)
    finally:
        handle.detach()


@pytest.mark.parametrize("phase", ["training", "waiting"])
@pytest.mark.parametrize("to", [(0, 1), (1,)], ids=["both", "one"])
def test_ctrl_c_ends_all_processes(tmp_path, phase, to):
    """While all train, or while rank 1 waits in `detach` for the other."""
    arguments = [(rank, str(tmp_path / "store"), phase) for rank in range(2)]
    with programs(trains_until_interrupted, arguments, tmp_path) as processes:
        for process in processes:
            process.wait_for_line("ready")
        time.sleep(0.1)  # for `detach` to wait
        for rank in to:
            processes[rank].send_signal(signal.SIGINT)
        codes = [process.wait(250) for process in processes]  # less than any timeout of the library
        errors = [process.stderr for process in processes]
    assert "KeyboardInterrupt" in errors[1]
    assert "KeyboardInterrupt" in errors[0] or "rank 1" in errors[0]
    assert all(codes)


def count_threads(comm):
    worker = Worker(comm)
    worker.step(value(0))
    during = [thread.name for thread in threading.enumerate()].count("thinwire-pairwise")
    worker.handle.detach()
    return during, [thread.name for thread in threading.enumerate()].count("thinwire-pairwise")


def test_there_is_one_thread_and_it_ends():
    assert spawn(2, count_threads) == [(1, 0)] * 2


def resident_bytes(comm):
    """After some averagings, and after ten times as many; messages are of 1 MB."""
    model = nn.Linear(512, 512, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    handle, sizes = tw.gossip_asynchronously(model, optimizer, comm=comm), []
    for num in (20, 120):
        while handle.num_averaged < num:
            optimizer.step()
            time.sleep(0.001)
        pages = int(open("/proc/self/statm").read().split()[1])
        sizes.append(pages * os.sysconf("SC_PAGE_SIZE"))
    handle.detach()
    return sizes, handle.num_averaged


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_is_steady():
    for (early, late), averaged in spawn(2, resident_bytes):
        assert averaged >= 120
        assert late - early < 20e6  # of more than 100 MB that were sent in between


def own_group(comm):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    handle = tw.gossip_asynchronously(model, optimizer)
    optimizer.step()
    handle.detach()
    return True


def test_a_process_group_of_its_own():
    assert spawn(2, own_group) == [True, True]


def test_a_lone_worker_trains_as_alone():
    worker, _ = run_threads(1, with_gradients, 0, [10])[0]
    assert torch.allclose(worker.double(), 1.0 - sum(value(0, 0, step).double() for step in range(10)), atol=1e-5)


# ---- mistakes ----


def test_an_odd_number_of_workers_is_a_mistake_of_all():
    errors = spawn(3, Worker, return_errors=True)
    assert all("number must be even" in str(error) for error in errors)
    suggested = str(errors[0]).partition("workers, or ")[2]

    def worker(comm):
        model = torch.nn.Linear(2, 2)
        with tw.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), suggested, comm=comm) as handle:
            return isinstance(handle.strategy, tw.Gossip)

    assert tw.LocalWorld(3).run(worker) == [True] * 3


def averaged_alone(comm):
    tw.consensus([("x", torch.ones(2))], tw.Pairwise(), 3, comm)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: tw.Pairwise(tw.Ring()), "one side asks and the other answers"),
        (lambda: tw.Pairwise(tw.topology.BipartiteExponential(peers=2)), "a pair is two workers"),
        (lambda: tw.Pairwise(tw.topology.BipartiteLinear(static=True)), "a pair is two workers"),
        (lambda: run_threads(2, averaged_alone), "must have rounds"),
    ],
)
def test_mistakes(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_the_repr_rebuilds_it():
    for averager in (tw.Pairwise(), tw.Pairwise(tw.topology.BipartiteLinear())):
        assert tw.parse(repr(averager)) == averager


def test_active_workers_meet_every_passive_one():
    averager = tw.Pairwise(tw.topology.BipartiteLinear())
    for rank in (1, 3, 5, 7):
        assert sorted(averager.peer(rank, k, 8) for k in range(4)) == [0, 2, 4, 6] == averager.partners(rank, 8)
