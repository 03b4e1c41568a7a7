"""Seconds on a modelled network: closed forms, the plan's predictions, overlap, and repetition."""

from __future__ import annotations

import time

import pytest
import torch

import thinwire as tw
from thinwire.comm import Layout, laid_out
from thinwire.plan import (
    Link,
    Method,
    Network,
    SimulatedWorld,
    Speeds,
    TracedCommunicator,
    Workload,
    ddp_buckets,
    predict_method,
)

LINK = Link(bytes_per_second=1e6, latency_seconds=0.01)
FREE = Link(bytes_per_second=1e30)
SPARSE = tw.chain(tw.TopK(0.05), tw.QSGD(bits=4))


def seconds(fn, size, *args, per_node=1, outer=LINK, inner=FREE, measures=False):
    def timed(comm):
        fn(comm, *args)
        return comm.virtual_seconds()

    network = Network(size, per_node, outer=outer, inner=inner)
    found = SimulatedWorld(network, measures).run(timed)
    assert len(set(found)) == 1
    return found[0]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_collectives_take_their_closed_forms(size):
    x = torch.zeros(2500)
    in_two_steps = {1: 0.0, 2: 0.01 + 0.01}.get(size, 2 * 0.01 + 2 * (size - 1) * 0.01 / size)
    assert seconds(lambda comm: comm.all_reduce(x.clone()).wait(), size) == pytest.approx(in_two_steps)
    gather = (size - 1) * 0.01 + 0.01 * (size > 1)
    assert seconds(lambda comm: comm.all_gather(x).wait(), size) == pytest.approx(gather)
    sizes_first = gather + ((size - 1) * 8e-6 + 0.01) * (size > 1)
    assert seconds(lambda comm: comm.all_gather(x, variable=True).wait(), size) == pytest.approx(sizes_first)


@pytest.mark.parametrize(("size", "expected"), [(2, 0.02), (4, 0.04), (8, 0.06)])
def test_a_broadcast_goes_down_a_tree(size, expected):
    # Each of the log2 W rounds takes a latency and a message; the root has sent its earlier messages by then.
    x = torch.zeros(2500)
    assert seconds(lambda comm: comm.broadcast(x.clone(), root=1).wait(), size) == pytest.approx(expected)


def test_a_broadcast_comes_before_messages_that_follow_it():
    def work(comm):
        broadcast = comm.broadcast(torch.zeros(250))
        sends, receives = [{1: torch.zeros(25_000)}, {}], [{}, {0: torch.zeros(25_000)}]
        exchange = comm.exchange(sends[comm.rank], receives[comm.rank])
        broadcast.wait()
        comm.compute(0.5 * comm.rank)
        exchange.wait()

    assert seconds(work, 2) == pytest.approx(0.01 + 0.001 + 0.5)


def test_workers_of_a_node_share_its_line():
    x = torch.zeros(250)
    expected = 2 * 6 * 1000 / 1e6 + 0.01
    assert seconds(lambda comm: comm.all_gather(x).wait(), 8, per_node=2) == pytest.approx(expected)


def test_computation_overlaps_with_what_is_under_way():
    def work(comm, computing, is_waited_first):
        handle = comm.exchange({1 - comm.rank: torch.zeros(25_000)}, {1 - comm.rank: torch.zeros(25_000)})
        if is_waited_first:
            handle.wait()
        comm.compute(computing)
        handle.wait()

    assert seconds(work, 2, 0.05, False) == pytest.approx(0.11)
    assert seconds(work, 2, 0.3, False) == pytest.approx(0.3)
    assert seconds(work, 2, 0.3, True) == pytest.approx(0.41)


def test_reading_the_clock_lets_operations_travel_on():
    def work(comm):
        peer = 1 - comm.rank
        handle = comm.exchange({peer: torch.zeros(25_000)}, {peer: torch.zeros(25_000)})
        comm.compute(0.02)
        assert comm.virtual_seconds() == pytest.approx(0.02)
        comm.compute(0.02 * (comm.rank + 1))
        assert comm.virtual_seconds() == pytest.approx(0.06)  # of the slower worker
        handle.wait()

    assert seconds(work, 2) == pytest.approx(0.11)


SHAPES = [torch.Size([600, 500]), torch.Size([40]), torch.Size([700, 600])]
AVERAGERS = [
    tw.Mean(exchange="all_reduce"),
    tw.Mean(tw.QSGD(bits=4), exchange="all_gather"),
    tw.Mean(tw.QSGD(bits=4), exchange="scatter_reduce"),
    tw.Mean(SPARSE, tw.ErrorFeedback(), exchange="sparse_reduce"),
    tw.Mean(tw.QSGD(bits=4), exchange="hierarchical", workers_per_node=2),
    tw.PowerSGD(rank=2),
]


@pytest.mark.parametrize("outer", [Link(1e6, 0.001), Link(1e7, 0.05)], ids=["slow", "long"])
@pytest.mark.parametrize("averager", AVERAGERS, ids=repr)
def test_a_round_takes_as_long_as_the_plan_predicts(averager, outer):
    def round_in_buckets(comm):
        generator = torch.Generator().manual_seed(comm.rank)
        named = [(f"t{i}", torch.randn(shape, generator=generator)) for i, shape in enumerate(SHAPES)]
        state = averager.init(named, comm)
        begun = comm.virtual_seconds()
        buckets, rest = [], named[::-1]
        for bucket in ddp_buckets(SHAPES):
            buckets.append(rest[: len(bucket)])
            rest = rest[len(bucket) :]
        for handle in [averager.step(state, bucket, comm) for bucket in buckets]:
            handle.wait()
        return comm.virtual_seconds() - begun

    network = Network(4, 2, outer=outer, inner=Link(1e8, 0.0001))
    (found, *_) = SimulatedWorld(network, measures=False).run(round_in_buckets)
    workload, no_work = Workload(tuple(SHAPES), 0.0), Speeds(copy_bytes_per_second=float("inf"))
    predicted, _ = predict_method(Method("", tw.Gradients(averager), ""), workload, network, no_work)
    assert found == pytest.approx(predicted, rel=0.03)


def test_the_last_bucket_sends_its_second_message_while_the_first_is_waited_for():
    """`scatter_reduce` takes two latencies, for two buckets too."""

    def work(comm, num_buckets):
        averager = tw.Mean(tw.QSGD(bits=4), exchange="scatter_reduce")
        tensors = [(f"x{i}", torch.ones(8, 8)) for i in range(num_buckets)]
        state = averager.init(tensors, comm)
        begun = comm.virtual_seconds()
        for handle in [averager.step(state, [tensor], comm) for tensor in tensors]:
            handle.wait()
        return comm.virtual_seconds() - begun

    world = SimulatedWorld(Network(3, outer=Link(1e9, 0.1)), measures=False)
    assert [world.run(work, n)[0] for n in (1, 2)] == pytest.approx([0.2, 0.2], rel=0.01)


GOSSIP = [
    tw.Mix(tw.topology.Hierarchical(tw.Ring(), 2)),
    tw.Mix(tw.topology.Phases(((0, tw.topology.Hierarchical(tw.Ring(), 2)), (3, tw.Ring())))),
    tw.Mix(tw.topology.Star()),
    tw.Choco(tw.Ring()),
    tw.average.ClippedGossip(tw.Complete()),
    tw.Moniqua(tw.Ring()),
]


@pytest.mark.parametrize("per_node", [1, 2])
@pytest.mark.parametrize("averager", GOSSIP, ids=repr)
def test_a_round_of_gossip_takes_as_long_as_the_plan_predicts(averager, per_node):
    def timed(comm):
        generator = torch.Generator().manual_seed(comm.rank)
        named = [(f"t{i}", torch.randn(shape, generator=generator)) for i, shape in enumerate(SHAPES[1:])]
        state = averager.init(named, comm)
        for _ in range(averager.topology.steps(8)[-1]):  # a plan is of the last phase
            averager.step(state, named, comm).wait()
        begun = comm.virtual_seconds()
        averager.step(state, named, comm).wait()
        return comm.virtual_seconds() - begun

    network = Network(8, per_node, outer=Link(1e6, 0.001), inner=Link(1e8, 0.0001))
    (found, *_) = SimulatedWorld(network, measures=False).run(timed)
    workload, no_work = Workload(tuple(SHAPES[1:]), 0.0), Speeds(copy_bytes_per_second=float("inf"))
    predicted, _ = predict_method(Method("", tw.Gossip(averager)), workload, network, no_work)
    assert found == pytest.approx(predicted)


def train(comm, steps, overlap):
    """Seconds of `steps` rounds of gossip with 0.1 s of computation each; a round sends for 0.08 s."""
    torch.manual_seed(0)
    model = torch.nn.Linear(100, 100, bias=False)  # 40 kB to each of two neighbours
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with tw.gossip_parameters(model, optimizer, tw.Mix(tw.Ring()), comm=comm, overlap=overlap):
        begun = comm.virtual_seconds()
        for _ in range(steps):
            comm.compute(0.1)
            model(torch.ones(1, 100) * comm.rank).sum().backward()
            optimizer.step()
        taken = comm.virtual_seconds() - begun
    return taken


def test_overlapped_gossip_hides_its_rounds_behind_computation():
    world = SimulatedWorld(Network(4, outer=Link(1e6, 0.0)), measures=False)
    assert world.run(train, 5, False)[0] == pytest.approx(5 * 0.1 + 4 * 0.08)  # the first step needs no round
    assert world.run(train, 5, True)[0] == pytest.approx(5 * 0.1)


def test_gradients_are_sent_while_backward_computes():
    def step(comm, late):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(50, 50, bias=False) for _ in range(4)]  # 10 kB, an all-reduce of two takes 0.01 s
        model = torch.nn.Sequential(*layers)
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda _: comm.compute(0.02))
        size = 10**9 if late else 1
        with tw.compress_gradients(model, tw.Mean(exchange="all_reduce"), comm=comm, bucket_bytes=size):
            begun = comm.virtual_seconds()
            model(torch.ones(1, 50)).sum().backward()
            return comm.virtual_seconds() - begun

    world = SimulatedWorld(Network(2, outer=Link(1e6, 0.0)), measures=False)
    assert world.run(step, True)[0] == pytest.approx(4 * 0.02 + 4 * 0.01, rel=1e-3)
    assert world.run(step, False)[0] == pytest.approx(4 * 0.02 + 0.01, rel=1e-3)


def test_processor_time_counts_but_not_sleep_nor_the_communicator():
    def burn(comm, until):
        start = time.thread_time()
        while time.thread_time() - start < until * comm.rank:
            sum(range(1000))
        time.sleep(0.05)
        comm.all_reduce(torch.zeros(250)).wait()

    network_alone = 0.01 + 1000 / 1e6
    found = seconds(burn, 2, 0.1, measures=True)
    assert 0.1 + network_alone < found < 0.1 + network_alone + 0.04
    assert seconds(burn, 2, 0.1, measures=False) == pytest.approx(network_alone)


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="cannot serve 4"):
        tw.LocalWorld(4).run(lambda comm: TracedCommunicator(comm, Network(2)))
    with pytest.raises(ValueError, match="no common order"):
        seconds(lambda comm: comm.open_channel([1 - comm.rank]), 2)
    with pytest.raises(ValueError, match="TracedCommunicator has ranks that cannot change; leave layout out"):
        seconds(lambda comm: laid_out(comm, Layout((1, 0))), 2)


def test_a_message_from_before_the_start_stops_the_clock_on_all_workers():
    def late(comm):
        traced = TracedCommunicator(comm, Network(2))
        if comm.rank == 0:
            traced.exchange({1: torch.zeros(1)}, {}).wait()
        traced.start(comm.reordered(range(2)))
        if comm.rank == 1:
            traced.exchange({}, {0: torch.zeros(1)}).wait()
        with pytest.raises(ValueError, match="virtual clock stopped: a worker waits for a message that nobody sends"):
            traced.virtual_seconds()

    tw.LocalWorld(2).run(late)
