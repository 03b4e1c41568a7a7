"""On the simulated GPU: no work runs ahead of what it needs, none waits longer, and random strategies train as on the CPU.

PYTHONPATH=tests .venv/bin/python -m pytest -p helpers.simulated_gpu tests/gpu/check_simulated.py
"""

from __future__ import annotations

import copy
import gc
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers import simulated_gpu
from helpers.averagers import GOSSIP
from helpers.codecs import CODECS
from helpers.operations import all_operations, many_outstanding
from helpers.program import wait_until
from helpers.simulated_gpu import IS_INTERPRETED, SIMULATED
from helpers.spawn import meet, retire, spawn
from hypothesis import given, settings
from hypothesis import strategies as st
from strategy.test_compositions import Model, Refused, strategies, trained
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map_only

import thinwire as tw
from thinwire import kernels, streams
from thinwire.clock import Clock
from thinwire.codec import Key
from thinwire.codec.compose import transform
from thinwire.comm import Background, ElasticCommunicator, Lighthouse, ProcessGroupCommunicator
from thinwire.comm.buffers import staged_tensor
from thinwire.comm.elastic import lighthouse
from thinwire.comm.handle import nothing
from thinwire.comm.issuer import Issuer
from thinwire.kernels import flags
from thinwire.kernels.random import keys_on
from thinwire.lab.bench.parts import seconds_of
from thinwire.membership import tensors_in
from thinwire.strategy.flight import Flight
from thinwire.strategy.gradients.rounds import GradientRounds
from thinwire.strategy.model.shards import Replica
from thinwire.streams import WorkStream, wait_for

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
BY_DEVICE = re.compile(
    "PowerSGD|Dion|PowerGossip|Choco"
)  # products of matrices, and a norm, are summed in another order
MODEL = Model()


@pytest.fixture(autouse=True)
def ended():
    """What a test has freed is in use no longer when the next one begins."""
    yield
    torch.cuda.synchronize()


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Its gradients are sums of two numbers, which have the same bits everywhere."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    ours = [p for p in model.parameters() if p.requires_grad]
    return sum((p * torch.randn(p.shape, generator=generator).to(p.device)).sum() + (p * p).sum() / 2 for p in ours)


def tolerance_of(strategy):
    return 1e-3 if BY_DEVICE.search(repr(strategy)) else 0.0


def on(device, saved=None):
    """What `trained` takes for training on a device, from saved states on."""
    return saved and [state for _, state, _ in saved], lambda: copy.deepcopy(MODEL).to(device), loss_of


def assert_equal(found, expected, tolerance=0.0):
    for (ours, *_), (theirs, *_) in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, check_device=False)


def from_file(saved):
    """As after `torch.load(..., map_location="cpu")`."""
    return tree_map_only(torch.Tensor, torch.Tensor.cpu, saved)


@settings(max_examples=25 if IS_INTERPRETED else 100)
@given(
    parts=st.data(),
    workers=st.sampled_from([1, 2, 4]),
    momentum=st.sampled_from([0.0, 0.9]),
    saved=st.sampled_from([list, from_file]),
)
def test_random_compositions(parts, workers, momentum, saved):
    try:
        strategy = parts.draw(strategies())
    except Refused:
        return
    world = tw.LocalWorld(workers)
    try:
        expected = world.run(trained, strategy, momentum, *on(CPU))
    except ValueError:
        with pytest.raises(ValueError):
            world.run(trained, strategy, momentum, *on(GPU))
        return
    found = world.run(trained, strategy, momentum, *on(GPU))
    assert_equal(found, expected, tolerance_of(strategy))
    assert_equal(world.run(trained, strategy, momentum, *on(GPU, saved(found))), found)
    assert SIMULATED.races() == []


@pytest.mark.parametrize("averager", GOSSIP, ids=repr)
def test_a_round_in_flight_after_loading(averager):
    """What was in flight is saved, on the way. What was loaded is memory of the training's stream, and rounds change it."""
    strategy, world = tw.Gossip(averager, overlap=True, staleness=1), tw.LocalWorld(4)
    found = world.run(trained, strategy, 0.9, *on(GPU))
    assert_equal(found, world.run(trained, strategy, 0.9, *on(CPU)), tolerance_of(strategy))
    for saved in (found, from_file(found)):
        assert_equal(world.run(trained, strategy, 0.9, *on(GPU, saved)), found)


@pytest.mark.parametrize("averager", GOSSIP, ids=repr)
def test_a_round_in_flight_changes_its_state_in_place(averager):
    """What `init` made is memory of the training's stream, and would be handed out again while the work still reads it."""

    def worker(comm):
        net = copy.deepcopy(MODEL).to(GPU)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        with tw.attach(net, optimizer, tw.Gossip(averager, overlap=True), comm=comm) as handle:
            ((state, _),) = handle._averaged()
            made = [StorageWeakRef(t.untyped_storage()) for t in tensors_in(state)]
            for step in range(3):
                loss_of(net, step, comm.rank).backward()
                optimizer.step()
            return any(memory.expired() for memory in made)

    assert tw.LocalWorld(4).run(worker) == [False] * 4


def assert_that_the_host_has_not_waited(*tensors):
    """For whoever wrote them: a stream that waits for nobody must not read them."""
    for tensor in tensors:
        with torch.cuda.stream(torch.cuda.Stream()), pytest.raises(RuntimeError, match="has not waited"):
            tensor.sum()
        assert len(SIMULATED.races()) == 1


def test_backward_waits_for_the_work_at_its_end_only(monkeypatch):
    """The first bucket is decoded before the last one is launched. The training's stream waits, and the host does not."""
    decoded, finish, looks = threading.Event(), GradientRounds._finish, []
    monkeypatch.setattr(GradientRounds, "_finish", lambda *args: finish(*args) or decoded.set())
    monkeypatch.setattr(Replica, "commit", lambda *_: True)  # there the host waits

    def worker(comm):
        net = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 4)).to(GPU)
        x = torch.ones(3, 20, device=GPU, requires_grad=True)

        def look(_):
            with pytest.raises(RuntimeError, match="has not waited"):
                net[1].bias.grad.sum()
            looks.append(len(SIMULATED.races()))

        net[0].weight.register_hook(lambda _: looks.append(decoded.wait(60)))
        x.register_hook(look)
        with tw.compress_gradients(net, tw.Mean(tw.QSGD(bits=4)), comm=comm, bucket_bytes=1):
            net(x * 1).sum().backward()
            net[1].bias.grad.sum()
            assert_that_the_host_has_not_waited(x, net[1].bias.grad)

    tw.LocalWorld(1).run(worker)
    assert looks == [True, 1]


def test_what_takes_the_place_of_a_frozen_gradient_is_kept_until_the_training_waits():
    def worker(comm):
        net = nn.Sequential(*(nn.Linear(20, 20) for _ in range(10))).to(GPU)
        with tw.compress_gradients(net, tw.Mean(tw.QSGD(bits=4)), comm=comm, bucket_bytes=1):
            net[1:].requires_grad_(False)
            net(torch.ones(3, 20, device=GPU)).sum().backward()
            return net[1].weight.grad is None

    assert tw.LocalWorld(1).run(worker) == [True]


def test_memory_of_a_round_that_an_error_broke_off_is_kept_until_the_training_waits():
    def worker(comm):
        net = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20), nn.Linear(20, 4)).to(GPU)
        fails = [1]

        def explode(_):
            if fails:
                raise ZeroDivisionError(fails.pop())

        net[0].weight.register_hook(explode)
        with tw.compress_gradients(net, tw.Mean(tw.QSGD(bits=4)), comm=comm, bucket_bytes=1, max_nonfinite=3):
            with pytest.raises(ZeroDivisionError):
                net(torch.ones(3, 20, device=GPU)).sum().backward()
            net.zero_grad()
            net(torch.ones(3, 20, device=GPU)).sum().backward()

    tw.LocalWorld(1).run(worker)


@pytest.mark.parametrize(
    "strategy",
    [
        tw.Gossip(tw.Mix(), overlap=True),
        tw.Local(tw.Mean(tw.QSGD(bits=4)), every=3, delay=1),
        tw.Gradients(tw.Mean(tw.QSGD(bits=4)), bucket_bytes=1),
    ],
    ids=repr,
)
def test_memory_is_free_after_the_work_where_all_is_dropped_in_the_middle_of_a_round(strategy):
    def worker(comm):
        net = copy.deepcopy(MODEL).to(GPU)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        tw.attach(net, optimizer, strategy, comm=comm)
        for step in range(3):
            if step == 2 and isinstance(strategy, tw.Gradients):
                next(net.parameters()).register_hook(lambda _: 1 / 0)
            with suppress(ZeroDivisionError):
                loss_of(net, step, comm.rank).backward()
                optimizer.step()

    tw.LocalWorld(1).run(worker)
    gc.collect()
    torch.empty(3, device=GPU)


def test_a_thread_of_the_work_waits_for_messages_itself():
    """Its stream would be held up, and with it what is encoded later. Elsewhere the stream waits, and the host goes on."""
    work, messages, other = WorkStream(GPU), torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(messages):
        x, arrived = torch.ones(3, device=GPU), messages.record_event()
    wait_for(arrived, GPU)
    x.sum()
    with torch.cuda.stream(other), pytest.raises(RuntimeError, match="has not waited"):
        x.sum()
    assert len(SIMULATED.races()) == 1
    with work.continued():
        wait_for(arrived, GPU)
    with torch.cuda.stream(other):
        x.sum()


@pytest.mark.parametrize("wait", [Flight.wait, Flight.settle])
def test_the_training_goes_on_behind_a_flight(wait):
    background = Background("rounds")
    with torch.cuda.stream(torch.cuda.Stream()):
        made = wait(Flight(lambda: torch.ones(3, device=GPU), WorkStream(GPU), background))
        made.sum()
    assert_that_the_host_has_not_waited(made)
    background.close()


def noted_events(monkeypatch):
    """The options of the events that are made."""
    made = []
    monkeypatch.setattr(torch.cuda, "Event", lambda **options: made.append(options) or simulated_gpu.Event(**options))
    return made


@pytest.fixture
def events(monkeypatch):
    return noted_events(monkeypatch)


def test_a_message_of_the_gpu_uses_memory_in_order(events):
    """A thread that waits for its end sleeps: one that spins would take the processor from those that start kernels."""

    def change(x, y):
        x.add_(y)
        return nothing

    x, y, thread = torch.ones(3, device=GPU), torch.ones(3, device=GPU), Issuer()
    wait = thread.issue(GPU, partial(change, x, y), [x, y])
    thread.close()
    thread.join()
    del y
    torch.empty(3, device=GPU)
    wait()
    assert x.tolist() == [2, 2, 2]
    assert events == [{"blocking": True}]


@pytest.mark.parametrize("copied", [True, False])
def test_a_thread_sleeps_while_a_tensor_is_copied_into_pinned_memory(events, copied):
    """What is received lands there too, and nothing is waited for."""
    staged = staged_tensor(torch.ones(3, device=GPU), copied=copied)
    assert staged.is_pinned() and events == [{"blocking": True}] * copied
    assert not copied or staged.tolist() == [1, 1, 1]


def with_tensors_on_the_gpu(operations, comm):
    with GPU:
        operations(comm)


@pytest.mark.parametrize("operations", [all_operations, many_outstanding])
def test_what_gloo_cannot_send_from_goes_through_main_memory(operations):
    spawn(3, partial(with_tensors_on_the_gpu, operations))


def over_nccl(comm, do, *arguments):
    with ProcessGroupCommunicator(dist.new_group(backend="nccl")) as own:
        result = do(own, *arguments)
    torch.cuda.synchronize()
    return result


@pytest.mark.parametrize("operations", [all_operations, many_outstanding])
def test_operations_over_nccl(operations):
    spawn(3, over_nccl, partial(with_tensors_on_the_gpu, operations))


def parameters_of(comm, strategy):
    return ([p.cpu() for p in trained(comm, strategy, 0.0, *on(GPU))[0]],)


@pytest.mark.parametrize(
    "strategy",
    [
        tw.Gradients(tw.Mean(tw.QSGD(bits=4), tw.ErrorFeedback()), bucket_bytes=300),
        tw.Gradients(tw.Mean(tw.chain(tw.QSGD(bits=4), tw.codec.Huffman()))),
        tw.Gradients(tw.Mean(tw.QSGD(bits=4), exchange="scatter_reduce")),
        tw.Gradients(tw.Mean(tw.TopK(0.1), tw.MomentumCorrection(), exchange="sparse_reduce")),
        tw.Gradients(tw.Mean()),
        tw.Gradients(tw.PowerSGD(rank=1)),
        tw.Local(tw.Mean(tw.QSGD(bits=4)), every=2, delay=1, fragments=2),
        *(tw.Gossip(averager, overlap=True) for averager in GOSSIP[::3]),
    ],
    ids=repr,
)
def test_training_over_nccl(strategy):
    expected = tw.LocalWorld(4).run(parameters_of, strategy)
    assert_equal(spawn(4, over_nccl, parameters_of, strategy), expected, tolerance=1e-5)


# ---- workers that come and go ----

JOINS, LEAVES, ROUNDS = 2, 4, 6
SECONDS = 20.0


def place_for(min_workers):
    """A Lighthouse, and a function that waits until a worker asks it for a round."""
    made, quorums = [], lighthouse.Quorums
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lighthouse, "Quorums", lambda *options: made.append(quorums(*options)) or made[0])
        place = Lighthouse(min_workers, "127.0.0.1")
    return place, lambda: wait_until(lambda: made[0]._questions, "the joiner's question", SECONDS)


def elastic_rounds(comm, handle, optimizer, loss, joins, others_wait, all_met, leaves=False):
    """Train until so many rounds are committed; in one of them a worker joins, and in a later one another leaves.

    Nobody takes a step before the joiner has its state, because it would leave out those that others have taken.
    """
    while comm.counts.committed < ROUNDS:
        is_joined = comm.members is None if joins else comm.counts.committed == JOINS and not comm.in_round
        if is_joined and not joins:
            others_wait()
        handle.begin_round()
        if is_joined:
            all_met()
        if leaves and comm.counts.committed == LEAVES:
            comm._groups.hang_up()
            comm._asker.close()
            return
        optimizer.zero_grad()
        loss(comm.counts.committed, comm.rank).backward()
        optimizer.step()
    assert comm.counts.healings == joins
    handle.settle()


def elastic_run(strategy, device):
    """Worker 2 joins and worker 1 leaves in the middle of a round; each trains on a stream of its own. What is left of two."""
    place, wait_for_joiner = place_for(2)
    two, three, ended = threading.Barrier(2), threading.Barrier(3), threading.Barrier(3)

    def others_wait():
        three.wait(SECONDS)
        wait_for_joiner()
        two.wait(SECONDS)  # else one may see the question of the other

    def worker(number):
        on_its_own = torch.cuda.stream(torch.cuda.Stream() if device == GPU else None)
        with on_its_own, torch.autograd.set_multithreading_enabled(False):  # workers would share one thread
            if number == 2:
                three.wait(SECONDS)
            options = {"timeout_seconds": SECONDS, "quorum_seconds": SECONDS}
            comm, net = ElasticCommunicator(place.address, number, 2, **options), copy.deepcopy(MODEL).to(device)
            optimizer = torch.optim.SGD((p for p in net.parameters() if p.requires_grad), lr=0.05)
            handle = tw.attach(net, optimizer, strategy, comm=comm)
            meetings = others_wait, partial(three.wait, SECONDS)
            try:
                elastic_rounds(comm, handle, optimizer, partial(loss_of, net), number == 2, *meetings, number == 1)
            finally:
                ended.wait(SECONDS)
                comm.close()
            return ([p.detach().cpu() for p in net.parameters()],)

    with ThreadPoolExecutor(3) as threads:
        found = [*threads.map(worker, range(3))]
    place.close()
    return found[::2]


@pytest.mark.parametrize(
    "strategy",
    [
        tw.Local(tw.Mean(tw.chain(tw.TopK(0.5), tw.QSGD(bits=4)), tw.ErrorFeedback()), every=2, outer=tw.OuterSGD()),
        tw.Local(tw.Mean(tw.QSGD(bits=4)), every=4, fragments=2, delay=1, alpha=0.5, outer=tw.OuterSGD()),
        tw.Gradients(tw.Mean(tw.TopK(0.5), tw.MomentumCorrection()), bucket_bytes=1),
        tw.Gossip(tw.Mix(), overlap=True),
    ],
    ids=repr,
)
def test_a_worker_joins_and_another_one_leaves(strategy, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    found = elastic_run(strategy, GPU)
    assert_equal(found, elastic_run(strategy, CPU))
    if not (isinstance(strategy, tw.Gossip) or getattr(strategy, "alpha", 0)):
        assert_equal(found[:1], found[1:])


class Sums(nn.Module):
    """Gradients as in `loss_of`, where FSDP sees a forward pass; of the last tensor one process holds nothing."""

    def __init__(self, *parts):
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.weights = nn.ParameterList([torch.linspace(-1, 1, 15).view(5, 3), torch.ones(4), torch.ones(1)])

    def forward(self, step, rank):
        return sum((part(step, rank) for part in self.parts), loss_of(self.weights, step, rank))


def elastic_shards(comm, strategies, device):
    """The shards of each of four processes, which are two workers, after a run with each strategy."""
    retire()
    torch.set_num_threads(1)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    backends = {"backend_override": {"shard": "nccl"}} if device == GPU else {}
    names = ("replicate", "shard")
    mesh = dist.init_device_mesh(device.type, (2, 2), mesh_dim_names=names, **backends)["shard"]
    with torch.cuda.stream(torch.cuda.Stream() if device == GPU else None):
        return ([shard for strategy in strategies for shard in joined_shards(comm, mesh, device, strategy)],)


def joined_shards(comm, mesh, device, strategy):
    """Worker 1 joins worker 0."""
    from torch.distributed.fsdp import fully_shard

    place, wait_for_joiner = place_for(1) if comm.rank == 0 else (None, lambda: None)
    address = next(filter(None, comm.gather_objects(place and place.address)))
    joins, all_meet = comm.rank >= 2, [partial(meet, f"{strategy} {when}", range(4)) for when in ("before", "after")]
    net = Sums(Sums()).to(device)
    for part in (*net.parts, net):
        fully_shard(part, mesh=mesh)
    if joins:
        all_meet[0]()
    elastic = ElasticCommunicator(address, int(joins), 1, timeout_seconds=SECONDS, replica=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05, foreach=False)
    handle = tw.attach(net, optimizer, strategy, comm=elastic)
    if not handle.models_differ:
        elastic.share("optimizer", optimizer.state_dict, optimizer.load_state_dict)

    def others_wait():
        all_meet[0]()
        wait_for_joiner()

    def loss(step, _):
        return net(step, comm.rank)

    elastic_rounds(elastic, handle, optimizer, loss, joins, others_wait, all_meet[1])
    net.reshard()
    comm.barrier()
    handle.detach()
    elastic.close()
    comm.barrier()
    if place is not None:
        place.close()
    return [p.to_local().detach().cpu() for p in net.parameters()]


def test_a_worker_of_shards_joins():
    averager = tw.Mean(tw.chain(tw.TopK(0.5), tw.QSGD(bits=4)), tw.ErrorFeedback())
    strategies = [tw.Local(averager, every=2, outer=tw.OuterSGD()), tw.Gradients(averager)]
    found = spawn(4, elastic_shards, strategies, GPU)
    assert_equal(found, spawn(4, elastic_shards, strategies, CPU))
    assert_equal(found[:2], found[2:])


def one_copy_for_all_peers(comm):
    """Copies into main memory that an exchange of different tensors with all peers makes; the host waits for each."""
    with pytest.MonkeyPatch.context() as patch, GPU:
        made = noted_events(patch)
        parts = comm.all_to_all([torch.full((3 + p,), float(comm.rank)) for p in range(3)], [3 + comm.rank] * 3).wait()
    assert [part.tolist() for part in parts] == [[float(rank)] * (3 + comm.rank) for rank in range(3)]
    return made


def test_gloo_copies_a_gpus_tensors_into_main_memory_once_for_all_peers():
    assert spawn(3, one_copy_for_all_peers) == [[{"blocking": True}]] * 3


def gathered_on_two_streams(comm):
    x = torch.ones(3 + comm.rank, device=GPU)
    torch.cuda.synchronize()
    for _ in range(2):
        with torch.cuda.stream(torch.cuda.Stream()):
            parts = comm.all_gather(x, variable=True).wait()
            total = torch.cat(parts).sum()
            del parts
    torch.cuda.synchronize()
    return total.item()


def test_what_is_gathered_is_kept_from_messages_of_other_streams():
    assert spawn(2, gathered_on_two_streams) == [7.0, 7.0]


def test_the_host_waits_for_the_gpu_in_a_barrier():
    def worker(comm):
        comm.device, x = GPU, torch.ones(3, device=GPU)
        comm.barrier()
        with torch.cuda.stream(torch.cuda.Stream()):
            x.sum()

    tw.LocalWorld(2).run(worker)


def test_a_basis_of_frequencies_is_kept_for_each_stream_that_reads_it():
    """One that is forgotten, because there are many, is memory of the stream that made it."""
    codec, x = tw.chain(tw.codec.DCT(4), tw.TopK(0.5)), torch.randn(4, 6, device=GPU)
    payload, side = codec.encode(x), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        codec.decode(payload, x.shape)
    transform._basis.cache_clear()
    torch.empty(3, device=GPU)


# Where the host does wait, and why. Codecs whose size depends on the data wait for the size.
WAITING = {
    tw.RandomK: "cycle walking ends when every index is inside",
    tw.codec.Quantize: "uploads its table of levels",
    tw.NUQSGD: "uploads its table of levels",
    tw.ALQ: "uploads its table of levels",
    tw.AMQ: "uploads its table of levels",
    tw.codec.SVD: "the solver waits",
    tw.codec.Float4: "uploads its table of levels",
    tw.codec.Dynamic8: "uploads its table of levels",
}


def waits(codec: tw.codec.Codec) -> bool:
    return not codec.traits.fixed_size or type(codec) in WAITING or any(map(waits, codec.parts()))


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_the_host_waits_for_few_codecs(codec):
    keys = [Key(0, i, 0) for i in range(2)]
    with torch.cuda.stream(torch.cuda.Stream()):
        xs = [torch.randn(128, 64, device=GPU), torch.randn(50, 100, device=GPU)]
        codec.encode(xs, keys)  # makes what is kept
        queued = torch.ones(1, device=GPU)
        payload = codec.encode(xs, keys, [torch.empty_like(x) for x in xs])
        finite = codec.decode_sum([payload, payload], [torch.empty_like(x) for x in xs], 0.5, keys)
    assert isinstance(finite, flags.Unread) and {flag.device for flag in finite} == {GPU}
    with nullcontext() if waits(codec) else pytest.raises(RuntimeError, match="has not waited"):
        queued.sum()
    assert len(SIMULATED.races()) == (not waits(codec))


def test_corrupt_indices_are_reported_once_a_round():
    """Kernels count faults, stay inside their buffers, and `read` raises them."""
    codec, out = tw.TopK(0.1), torch.zeros(100, device=GPU)
    payload = codec.encode(torch.arange(100.0, device=GPU))
    flags.check_faults(GPU)  # none yet
    payload[-7:] = 255  # all of the indices
    finite = codec.decode_sum([payload], out)
    with pytest.raises(ValueError, match="payload: its indices are corrupt"):
        flags.read(finite)
    assert flags.read(finite)  # a fault is reported once


def test_indices_outside_are_reported_and_nothing_is_written_there():
    whole, indices = torch.zeros(30, device=GPU), torch.tensor([3, 90], dtype=torch.int32, device=GPU)
    kernels.scatter.add([whole[10:20]], indices, torch.ones(2, device=GPU), [2], 1.0)
    assert not whole[:10].any() and not whole[20:].any()
    with pytest.raises(ValueError, match="outside of its segment"):
        flags.check_faults(torch.device("cuda"))  # the current one


def test_counters_of_faults_are_zero_before_another_stream_sees_them(monkeypatch):
    """They are made on the stream of whoever asks first, and there is one tensor, whoever else asks meanwhile."""
    finish, published, asked = flags._finish, [], threading.Barrier(4)
    monkeypatch.setattr(flags, "_COUNTERS", {})
    monkeypatch.setattr(flags, "_finish", lambda device: published.append(device in flags._COUNTERS) or finish(device))

    def ask(_):
        asked.wait()
        return flags.fault_counters(GPU)

    with ThreadPoolExecutor(4) as threads:
        assert len({id(counters) for counters in threads.map(ask, range(4))}) == 1
    assert published == [False]


def test_the_host_waits_until_counters_of_faults_are_zero(monkeypatch):
    """Also where they are zero again, after their faults were raised."""
    monkeypatch.setattr(flags, "_COUNTERS", {})
    with torch.cuda.stream(torch.cuda.Stream()):
        x = torch.ones(3, device=GPU)
        flags.fault_counters(GPU)
    x.sum()
    with torch.cuda.stream(torch.cuda.Stream()), pytest.raises(ValueError, match="corrupt"):
        counters = torch.ones(len(flags.Fault), device=GPU)
        flags._raise_counted(counters, [1] * len(counters))
    assert not counters.any()


def test_one_thread_alone_loads_the_solvers(monkeypatch):
    """PyTorch raises a RuntimeError where a second thread asks for a decomposition while the first one loads them."""
    qr, loading, together = torch.linalg.qr, [], threading.Barrier(4)
    monkeypatch.setattr(streams, "_loaded", set())

    def slow(x):
        if len(x) == 1:
            loading.append(x)
            time.sleep(0.1)
            assert len(loading) == 1
        return qr(x)

    monkeypatch.setattr(torch.linalg, "qr", slow)

    def ask(_):
        together.wait()
        return kernels.low_rank.orthonormal(torch.ones(17, 40, device=GPU))

    with ThreadPoolExecutor(4) as threads:
        bases = [*threads.map(ask, range(4))]
    assert len(loading) == 1
    assert all(torch.allclose(basis @ basis.T, torch.eye(17, device=GPU), atol=1e-6) for basis in bases)


@pytest.fixture
def passes(monkeypatch):
    """Lets time of the simulated GPU pass, which stands still otherwise."""
    now = [0.0]
    monkeypatch.setattr(simulated_gpu, "time", SimpleNamespace(monotonic=lambda: sum(now)))
    return now.append


def test_the_clock_times_a_gpu_by_events(passes):
    clock = Clock()
    clock.device = GPU
    with torch.cuda.stream(torch.cuda.Stream()):
        for seconds in (2.5, 0.5):
            with clock("encode"):
                x = torch.ones(3, device=GPU)
                passes(seconds)
    assert clock.seconds == {"encode": 3.0}
    x.sum()  # the host has waited


def test_a_gpu_sleeps_while_the_host_starts_what_is_timed(passes, monkeypatch):
    slept = []
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: slept.append(passes(10.0)))
    assert seconds_of(lambda: passes(2.5), GPU) == 2.5 and len(slept) == 1


@pytest.mark.parametrize(
    "act", [lambda: keys_on([1], GPU), lambda: Issuer().issue(GPU, nothing)], ids=["upload", "message"]
)
def test_what_a_graph_does_not_replay_is_refused_while_one_is_captured(act):
    with (
        torch.cuda.graph(torch.cuda.CUDAGraph()),
        pytest.raises(ValueError, match="neither messages nor threads nor uploads"),
    ):
        act()


@pytest.mark.parametrize(
    "strategy",
    [
        tw.Gradients(tw.Mean(tw.QSGD(bits=4)), bucket_bytes=1),
        tw.Local(tw.Mean(), every=2, delay=1),
        tw.Gossip(tw.Mix()),
        tw.Gossip(tw.Mix(), overlap=True),
    ],
    ids=repr,
)
def test_a_step_that_is_captured_is_refused_before_it_begins(strategy):
    def worker(comm):
        net = copy.deepcopy(MODEL).to(GPU)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        with tw.attach(net, optimizer, strategy, comm=comm) as handle:
            for step in range(4):
                graph = torch.cuda.graph(torch.cuda.CUDAGraph()) if step == 1 else nullcontext()
                refused = pytest.raises(ValueError, match="CUDA graph") if step == 1 else nullcontext()
                with graph, refused:
                    optimizer.zero_grad()
                    loss_of(net, step, comm.rank).backward()
                    optimizer.step()
            return handle.num_skipped

    assert tw.LocalWorld(1).run(worker) == [0]


def read_what_another_stream_writes(is_right):
    x, side = torch.ones(3, device=GPU), torch.cuda.Stream()
    if is_right:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.sum()
    torch.cuda.synchronize()


def free_what_another_stream_reads(is_right):
    x, side = torch.ones(3, device=GPU), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.sum()
    if is_right:
        x.record_stream(side)
    del x
    torch.empty(3, device=GPU)
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    "program, message",
    [(read_what_another_stream_writes, "has not waited"), (free_what_another_stream_reads, "may be taken again")],
)
def test_a_race_is_an_error(program, message):
    torch.cuda.synchronize()
    program(True)
    assert SIMULATED.races() == []
    with pytest.raises(RuntimeError, match=message):
        program(False)
    assert len(SIMULATED.races()) == 1


def test_a_copy_to_the_host_arrives_when_the_host_waits():
    x, pinned = torch.arange(3.0, device=GPU), torch.zeros(3).pin_memory()
    pinned.copy_(x, non_blocking=True)
    assert pinned.isnan().all()
    torch.cuda.current_stream().record_event().synchronize()
    assert pinned.tolist() == [0, 1, 2]


def test_tensors_of_two_devices_do_not_mix():
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device=GPU) + torch.ones(2)
    with pytest.raises(RuntimeError, match="'mat2' is in main memory"):
        torch.ones(2, 2, device=GPU) @ torch.ones(2, 2)
