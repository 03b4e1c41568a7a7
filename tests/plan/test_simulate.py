"""The model of the network against closed forms."""

from __future__ import annotations

from functools import partial

import pytest

from thinwire.comm import Ledger
from thinwire.comm.sums import Route
from thinwire.plan import Link, Network, Program, simulate
from thinwire.plan.engine import Engine
from thinwire.plan.operations import PeerMessages, all_reduce
from thinwire.plan.record import Wait
from thinwire.plan.simulate import Bucket
from thinwire.plan.sized import Work

LINK = Link(bytes_per_second=1e6, latency_seconds=0.01)
FREE = Link(bytes_per_second=1e30)


def program(*step, stages=(), wait=(), at_once=True):
    return Program(tuple(step), tuple(stages), tuple(wait), Ledger(2), at_once)


def gather(rank, size, num_bytes):
    after = [(rank + step) % size for step in range(1, size)]
    messages = tuple((p, num_bytes) for p in after)
    return program((PeerMessages(messages, messages),), wait=[Wait(0)])


def sum_of_all(rank, size, num_bytes, per_node=1):
    return program(all_reduce(Route(rank, [one // per_node for one in range(size)]), num_bytes), wait=[Wait(0)])


def seconds(network, programs, backward=0.0, forward=0.0, work=lambda work: 0.0, fold=True):
    return simulate(network, [Bucket(backward, list(p)) for p in programs], forward, work, fold)


@pytest.mark.parametrize("size", [3, 8, 200, 1024])
def test_an_all_reduce_takes_two_steps(size):
    expected = 2 * (0.01 + (size - 1) / size * 1_000_000 / 1e6)
    assert seconds(Network(size, outer=LINK), [[sum_of_all(0, size, 1_000_000)]]) == pytest.approx(expected)


@pytest.mark.parametrize("per_node", [2, 4])
def test_an_all_reduce_leaves_a_node_once_however_many_workers_it_has(per_node):
    """Free inside a node; two steps between nodes, where each of L sends (L-1)/L n. Its workers' latencies may overlap."""
    num_nodes = 12 // per_node
    on_line = 2 * (num_nodes - 1) / num_nodes * 1_000_000 / 1e6
    network = Network(12, per_node, outer=LINK, inner=FREE)
    programs = [sum_of_all(rank, 12, 1_000_000, per_node) for rank in range(per_node)]
    assert on_line + 0.01 - 1e-9 <= seconds(network, [programs]) <= on_line + 0.02 + 1e-9
    assert sum(p.bytes_out(network) for p in programs) == pytest.approx(2 * (num_nodes - 1) / num_nodes * 1_000_000)


def test_a_later_step_keeps_its_messages_apart_from_those_of_later_operations():
    """Rank 0 sends its second step after 0.5 s; what both have sent in the next operation meanwhile is not taken for it."""
    ping = PeerMessages((), ((1, 1),)), PeerMessages(((1, 100_000),), ())
    pong = PeerMessages(((0, 1),), ()), PeerMessages((), ((0, 100_000),))
    first = program(ping, (PeerMessages(((1, 1),), ()),), wait=[Wait(0), Wait(1)])
    late = [Work("encode", 1, "other"), pong, (PeerMessages((), ((0, 1),)),)]
    second = program(*late, wait=[Wait(1), Work("decode", 1, "other"), Wait(0)])
    got = seconds(Network(2, outer=LINK), [[first, second]], work=lambda work: 0.5, fold=False)
    # The second operation's message is there at 0.5 s already, and the answer comes while rank 1 decodes.
    assert got == pytest.approx(1.0)


@pytest.mark.parametrize("size", [2, 5, 64])
def test_an_all_gather_takes_w_minus_1_messages_and_one_latency(size):
    expected = (size - 1) * 1000 / 1e6 + 0.01
    assert seconds(Network(size, outer=LINK), [[gather(0, size, 1000)]]) == pytest.approx(expected)


def test_workers_of_a_node_share_its_line():
    # 4 nodes of 2: each worker sends 6 messages out of its node, all through one line.
    network = Network(8, 2, outer=LINK, inner=FREE)
    expected = 2 * 6 * 1000 / 1e6 + 0.01
    assert seconds(network, [[gather(rank, 8, 1000) for rank in range(2)]]) == pytest.approx(expected)


@pytest.mark.parametrize("per_node", [1, 2, 4])
def test_one_node_stands_for_all(per_node):
    network = Network(8, per_node, outer=LINK, inner=Link(1e7, 0.001))
    makes = (
        lambda rank: gather(rank, 8, 5000),
        lambda rank: sum_of_all(rank, 8, 8000, per_node),
        lambda rank: sum_of_all(rank, 8, 800_000, per_node),
    )
    for make in makes:
        folded = seconds(network, [[make(rank) for rank in range(per_node)]] * 3)
        whole = seconds(network, [[make(rank) for rank in range(8)]] * 3, fold=False)
        assert folded == pytest.approx(whole, rel=1e-9)


def test_a_line_serves_in_the_order_of_arrival():
    # The second bucket's message waits until the first has left; both bear one latency.
    network = Network(2, outer=LINK)
    buckets = [[gather(0, 2, 100_000)], [gather(0, 2, 1000)]]
    assert seconds(network, buckets) == pytest.approx(0.1 + 0.001 + 0.01)
    assert seconds(network, buckets[:1]) == pytest.approx(0.1 + 0.01)


def test_a_step_is_no_shorter_than_computation_or_network():
    network = Network(2, outer=LINK)
    wire = 4 * 0.05 + 0.01
    for backward in (0.0, 0.01, 0.05, 0.2):
        step = seconds(network, [[gather(0, 2, 50_000)]] * 4, backward, forward=0.03)
        compute = 0.03 + 4 * backward
        assert max(compute, wire) <= step <= compute + wire
    # Computation hides all but the last message.
    assert seconds(network, [[gather(0, 2, 50_000)]] * 4, 0.2) == pytest.approx(0.8 + 0.05 + 0.01)


def test_encoding_delays_backward_and_decoding_follows_the_last_send():
    step = [Work("encode", 10, "codec"), (PeerMessages(((1, 1000),), ((1, 1000),)),)]
    buckets = [[program(*step, wait=[Wait(0), Work("decode", 10, "codec")])]] * 2
    cost = {"encode": 0.2, "decode": 0.3}
    got = seconds(Network(2, outer=FREE), buckets, 0.1, work=lambda work: cost[work.part])
    assert got == pytest.approx(2 * (0.1 + 0.2) + 2 * 0.3)


def test_messages_with_no_sender_are_an_error():
    lonely = program((PeerMessages((), ((1, 10),)),), wait=[Wait(0)])
    with pytest.raises(ValueError, match="nobody sends"):
        seconds(Network(2, outer=LINK), [[lonely]])


def test_a_message_that_is_on_its_way_is_waited_for():
    """It takes 0.2 s and a latency; who asks for it in the middle of that gets it at the same time."""
    sends = program((PeerMessages(((1, 200_000),), ()),), wait=[Wait(0)])
    receives = program(Work("encode", 1, "other"), (PeerMessages((), ((0, 200_000),)),), wait=[Wait(0)])
    got = seconds(Network(2, outer=LINK), [[sends, receives]], work=lambda work: 0.1, fold=False)
    assert got == pytest.approx(0.01 + 0.2)


def test_texts_of_rates_and_times():
    assert Link.of("100mbit", "50us") == Link(12.5e6, 50e-6)
    assert Link.of("25Gb/s").bytes_per_second == 25e9 / 8
    for wrong in ("fast", "1.2.3gbit", "0gbit"):
        with pytest.raises(ValueError):
            Link.of(wrong)
    with pytest.raises(ValueError, match="must divide"):
        Network(6, 4)


def test_short_messages_pay_for_operations_and_messages_and_bursts_are_free():
    costly = Network(4, outer=Link(1e6, 0.01, message_seconds=0.001, operation_seconds=0.1))
    assert seconds(costly, [[gather(0, 4, 1000)]]) == pytest.approx(0.1 + 3 * (0.001 + 0.001) + 0.01)
    assert seconds(costly, [[sum_of_all(0, 4, 4000)]]) == pytest.approx(0.1 + 2 * (3 * (0.001 + 0.001) + 0.01))
    # The first 2000 bytes of 3000 leave at once; the rest waits for tokens.
    bursts = Network(4, outer=Link(1e6, 0.01, burst_bytes=2000))
    assert seconds(bursts, [[gather(0, 4, 1000)]]) == pytest.approx(0.001 + 0.01)


@pytest.mark.parametrize(
    "cores, ends", [(None, (0.5, 1.0, 1.1)), (2, (0.5, 1.0, 1.1)), (1, (1.15, 1.9, 1.65)), (0.5, (2.65, 3.8, 2.95))]
)
def test_threads_at_work_get_equal_parts_of_the_cores(cores, ends):
    # On one core, 0.35 s of the first two are done at 0.7 s. Then a third of the core is left for each: the first ends
    # 3 x 0.15 s later. The two that are left get half a core each, until the third ends.
    engine, ended = Engine(Network(1, cores=cores), fold=True), [0.0] * 3

    def end(number):
        ended[number] = engine.now

    for number, (start, work) in enumerate([(0.0, 0.5), (0.0, 1.0), (0.7, 0.4)]):
        engine.at(start, partial(engine.work, 0, work, partial(end, number)))
    engine.run()
    assert ended == pytest.approx(list(ends))


def test_workers_of_a_node_share_its_cores():
    for cores, expected in [(None, 0.3), (4, 0.3), (1, 0.6)]:
        network = Network(4, 2, outer=FREE, inner=FREE, cores=cores)
        assert seconds(network, [[program()] * 2], backward=0.2, forward=0.1) == pytest.approx(expected)
