"""Programs against real runs, and what predictions say."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter, defaultdict, deque
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.ledgers import ledger_of_round
from helpers.pages import blocks

import thinwire as tw
from thinwire.average.mean.exchange import EXCHANGES
from thinwire.comm import Ledger
from thinwire.lab.recipes import recipes
from thinwire.plan import (
    Link,
    Method,
    Network,
    Program,
    Speeds,
    Workload,
    predict,
    predict_method,
    record,
    simulate,
)
from thinwire.plan.averagers import on_nodes
from thinwire.plan.methods import methods
from thinwire.plan.predict import programs_of
from thinwire.plan.record import PeerMessages, Recorder, Wait
from thinwire.plan.simulate import Bucket
from thinwire.topology.measured import shares

SHAPES = [torch.Size([64, 48]), torch.Size([48]), torch.Size([33, 17])]
NO_WORK = Speeds(copy_bytes_per_second=float("inf"))
SPARSE = tw.chain(tw.TopK(0.05), tw.QSGD(bits=4))
AVERAGERS = [
    tw.Mean(exchange="all_reduce"),
    tw.Mean(tw.Cast(), exchange="all_reduce"),
    *(tw.Mean(tw.QSGD(bits=4), exchange=name) for name in ("all_gather", "scatter_reduce")),
    tw.Mean(tw.QSGD(bits=4), exchange="hierarchical", workers_per_node=2),
    tw.Mean(SPARSE, tw.ErrorFeedback(), exchange="hierarchical", workers_per_node=2),
    tw.Mean(SPARSE, tw.ErrorFeedback(), exchange="all_gather", granularity="bucket"),
    tw.Mean(tw.TopK(0.05), tw.MomentumCorrection(), exchange="all_gather"),
    tw.Mean(tw.TopK(1.0), tw.MomentumCorrection(), exchange="all_gather"),
    tw.Mean(tw.TopK(0.05), tw.MomentumCorrection(), exchange="all_gather", clip=tw.average.ClipValueByGlobalNorm()),
    tw.Mean(tw.codec.SignNorm(), tw.ErrorFeedback(), exchange="all_gather", clip=tw.average.ClipByNorm(1.0)),
    tw.PowerSGD(rank=2),
    tw.average.Dion(rank=2),
    *(
        replace(strategy.averager, exchange="all_gather")
        for strategy in (tw.strategy.demo(frequencies=4), tw.sparse_loco(), tw.streaming_diloco())
    ),
    tw.Mix(tw.topology.RandomPairs()),
    tw.Mix(tw.Ring()),
    tw.Choco(tw.Ring()),
    tw.Choco(tw.Ring(), tw.TopK(0.1), 0.2),
    tw.DeepSqueeze(tw.Ring()),
    tw.PowerGossip(tw.Ring()),
    tw.Mix(tw.topology.Hierarchical(tw.Ring(), 2)),
    tw.PushSum(tw.topology.Hierarchical(tw.topology.DirectedRing(), 2)),
    tw.average.ClippedGossip(tw.Complete()),
    tw.Moniqua(tw.Ring()),
]


def real_ledger(comm, averager, shapes=SHAPES):
    generator = torch.Generator().manual_seed(comm.rank)
    tensors = [(f"t{i}", torch.randn(shape, generator=generator)) for i, shape in enumerate(shapes)]
    return ledger_of_round(comm, averager, tensors)


@pytest.mark.parametrize("averager", AVERAGERS, ids=repr)
def test_predicted_bytes_and_messages_are_those_of_a_real_run(averager):
    for rank, ledger in enumerate(tw.LocalWorld(4).run(real_ledger, averager)):
        (predicted,) = record(averager, SHAPES, [rank], size=4, workers_per_node=2)
        assert predicted.ledger.as_dict() == ledger.as_dict()
        if rank == 0:
            (alone,) = record(averager, SHAPES, [0], size=4, workers_per_node=2)
            # The model does not cut sums into whole elements.
            assert alone.bytes_out(Network(4)) == pytest.approx(ledger.bytes_sent, abs=4 * 4)


def test_a_gather_of_unknown_sizes_is_recorded_as_it_runs():
    def gather(comm):
        comm.all_gather(torch.zeros(5), variable=True).wait()
        return comm.ledger

    comm = Recorder(1, 3)
    comm.begin(defaultdict(deque))
    assert gather(comm) == tw.LocalWorld(3).run(gather)[1]
    sizes, tensors = (((2, n), (0, n)) for n in (8, 20))
    assert comm.actions == [(PeerMessages(sizes, sizes), PeerMessages(tensors, tensors)), Wait(0)]


@pytest.mark.parametrize("memory", [tw.ErrorFeedback(), tw.MomentumCorrection()], ids=repr)
@pytest.mark.parametrize("codec", [tw.TopK(0.05), SPARSE], ids=repr)
@pytest.mark.parametrize("exchange", ["sparse_reduce", "hierarchical_sparse"])
def test_predicted_bytes_of_a_sparse_all_reduce_are_close_to_those_of_a_real_run(exchange, codec, memory):
    averager = on_nodes(tw.Mean(codec, memory, exchange=exchange), 2)
    shapes = [torch.Size([200, 150]), torch.Size([200]), torch.Size([90, 70])]
    programs = record(averager, shapes, range(4), size=4, workers_per_node=2)
    real = tw.LocalWorld(4).run(real_ledger, averager, shapes)
    for program, ledger in zip(programs, real, strict=True):
        assert program.ledger.messages == ledger.messages
        assert program.ledger.bytes_sent == pytest.approx(ledger.bytes_sent, rel=0.03)
    seconds = simulate(Network(4, 2, Link(1e6, 0.001)), [Bucket(0.1, programs[:2])], 0.0, lambda work: 0.0)
    leader_sends = max(program.ledger.bytes_sent for program in programs)
    assert 0.1 < seconds < 0.1 + 3 * leader_sends / 1e6 + 0.02


def test_a_program_shifted_to_another_rank_is_that_of_this_rank():
    averager = tw.Mean(SPARSE, tw.ErrorFeedback(), exchange="all_gather")
    first, second = (record(averager, SHAPES, [rank], 4)[0] for rank in (0, 1))
    assert first.shifted(1, 4).step == second.step and first.shifted(1, 4).wait == second.wait


@pytest.mark.parametrize("exchange", ["hierarchical", "hierarchical_sparse"])
def test_a_leader_and_one_member_stand_for_all_workers_of_a_node(exchange):
    averager = tw.Mean(SPARSE, tw.ErrorFeedback(), exchange=exchange)
    shapes = tuple(SHAPES)
    (((_, programs),),) = programs_of(tw.Gradients(averager), shapes, 8, 4)
    assert list(programs) == record(on_nodes(averager, 4), shapes[::-1], range(4), 8, workers_per_node=4)


def test_equal_workers_are_recorded_once(monkeypatch):
    """What a plan of many workers costs: one worker, or a leader and a member, and not the eight of a node."""
    recorded, begin = Counter(), Recorder.begin

    def counted(recorder, mail):
        recorded[recorder.size] += 1
        begin(recorder, mail)

    monkeypatch.setattr(Recorder, "begin", counted)
    for workers in (16, 64):
        for exchange in ("all_gather", "scatter_reduce", "hierarchical"):
            programs_of(tw.Gradients(tw.Mean(tw.QSGD(bits=4), exchange=exchange)), tuple(SHAPES), workers, 8)
    assert recorded == {16: 4, 64: 4}


@pytest.fixture
def star(monkeypatch):
    """A `Mean` over the exchange of the guide, in which rank 0 collects all messages and broadcasts them."""
    monkeypatch.setitem(EXCHANGES, "star", None)  # so that it is taken out again
    page = Path(__file__).parents[2] / "docs" / "guide" / "add-an-exchange.md"
    exec(blocks(page)[0].code, {"__name__": "star"})
    return tw.Mean(tw.QSGD(bits=4), tw.ErrorFeedback(), exchange="star")


@pytest.mark.parametrize("size", [2, 4, 8])
def test_an_exchange_that_broadcasts_takes_its_closed_form(star, size):
    """Rank 0 gets W - 1 messages of m bytes; then W m bytes go down a tree of log2 W rounds."""
    network = Network(size, outer=Link(1e6, 0.01))
    seconds, num_bytes = predict_method(
        Method("star", tw.Gradients(star)), Workload((torch.Size([500, 400]),), 0.0), network, NO_WORK
    )
    message, rounds = tw.QSGD(bits=4).nbytes(200_000), size.bit_length() - 1
    assert num_bytes == rounds * size * message
    collected = 0.01 + (size - 1) * message / 1e6
    assert seconds == pytest.approx(collected + rounds * (0.01 + size * message / 1e6))


def test_an_exchange_that_broadcasts_is_recorded_as_it_runs(star):
    for rank, ledger in enumerate(tw.LocalWorld(4).run(real_ledger, star)):
        (predicted,) = record(star, SHAPES, [rank], size=4)
        assert predicted.ledger.as_dict() == ledger.as_dict()
        assert predicted.bytes_out(Network(4), rank) == ledger.bytes_sent
    with pytest.raises(ValueError, match="a broadcast has a root"):
        predicted.shifted(1, 4)


def test_the_bytes_of_a_plan_are_those_of_the_node_that_sends_most():
    """Rank 1 is in the middle of a line, and has two neighbours; rank 0 is at its end."""
    line = Method("line", tw.Gossip(tw.Mix(tw.topology.Graph(((0, 1), (1, 2))))))
    _, num_bytes = predict_method(line, Workload((torch.Size([1000]),), 0.0), Network(3), NO_WORK)
    assert num_bytes == 2 * 4000


def bytes_out(comm, averager, num_rounds, workers_per_node, shapes=tuple(SHAPES)):
    """What this worker sends to other nodes in so many rounds."""
    tensors, sent = [(f"t{i}", torch.randn(shape)) for i, shape in enumerate(shapes)], []
    state, exchange = averager.init(tensors, comm), comm._start_exchange

    def counted(sends, receives):
        node = comm.rank // workers_per_node
        sent.extend(t.nbytes for peer, t in sends.items() if peer // workers_per_node != node)
        return exchange(sends, receives)

    comm._start_exchange = counted
    for _ in range(num_rounds):
        averager.step(state, tensors, comm).wait()
    return sum(sent)


IN_TIME = [
    tw.PushSum(tw.topology.Exponential()),  # one peer, 1, 2 and 4 ranks away
    tw.Mix(tw.topology.OddExponential()),
    tw.Mix(tw.topology.Hierarchical(tw.topology.RandomPairs(num_steps=5), 2)),
    tw.PushSum(tw.topology.Phases(((0, tw.Complete()), (1, tw.topology.Exponential())), steps_per_epoch=3)),
]


@pytest.mark.parametrize("averager", IN_TIME, ids=repr)
def test_a_plan_has_the_mean_bytes_of_a_topology_that_varies_in_time(averager):
    before, period = 3 if isinstance(averager.topology, tw.topology.Phases) else 0, averager.topology.period(8)
    after, until = (tw.LocalWorld(8).run(bytes_out, averager, n, 4) for n in (before, before + period))
    nodes = [sum(until[i : i + 4]) - sum(after[i : i + 4]) for i in (0, 4)]
    _, planned = predict_method(
        Method("gossip", tw.Gossip(averager)), Workload(tuple(SHAPES), 0.0), Network(8, 4), NO_WORK
    )
    assert planned == pytest.approx(max(nodes) / period) and planned > 0


@pytest.mark.parametrize("iterations", [1, 2, 3])
def test_a_plan_has_the_mean_bytes_of_rounds_that_alternate(iterations):
    """PowerGossip sends 4 (n + m) r bytes of a matrix in two half steps, and the next half step is of the other side."""
    averager, link = tw.PowerGossip(tw.Ring(), rank=2, iterations=iterations), Link(1e6)
    shapes = (torch.Size([300, 7]), torch.Size([11]))
    sent = tw.LocalWorld(4).run(bytes_out, averager, 2, 1, shapes)
    seconds, planned = predict_method(
        Method("low rank", tw.Gossip(averager)), Workload(shapes, 0.0), Network(4, outer=link), NO_WORK
    )
    by_hand = 2 * (iterations * 4 * (300 + 7) * 2 / 2 + 4 * 11)  # two neighbours, two columns; vectors once a round
    assert planned == by_hand == sent[0] / 2
    assert seconds == pytest.approx(by_hand / 1e6, rel=1e-3)


@pytest.mark.parametrize(("workers", "workers_per_node"), [(8, 4), (6, 1), (9, 3)])
def test_a_plan_has_the_mean_bytes_of_random_pairs(workers, workers_per_node):
    """Of an even number of workers those of any pairs, of an odd number those of the pairs that this seed draws."""
    averager, period = tw.Mix(tw.topology.RandomPairs(num_steps=256)), 256
    sent = tw.LocalWorld(workers).run(bytes_out, averager, period, workers_per_node)
    nodes = [sum(sent[i : i + workers_per_node]) for i in range(0, workers, workers_per_node)]
    _, planned = predict_method(
        Method("pairs", tw.Gossip(averager)), Workload(tuple(SHAPES), 0.0), Network(workers, workers_per_node), NO_WORK
    )
    # The number of pairs between nodes varies by half of its mean, the mean of 256 draws by 3 %: three of these.
    assert planned == pytest.approx(max(nodes) / period, rel=1e-9 if workers % 2 else 0.09)


def test_a_plan_has_the_mean_seconds_of_a_topology_that_varies_in_time():
    """Of 4 workers of a node, 1, 2 and 4 send to another node, over its one line."""
    link, numel = Link(1e6), 1000
    seconds, _ = predict_method(
        Method("gossip", tw.Gossip(tw.Mix(tw.topology.Exponential()))),
        Workload((torch.Size([numel]),), 0.0),
        Network(8, 4, outer=link, inner=Link(1e12)),
        NO_WORK,
    )
    assert seconds == pytest.approx((1 + 2 + 4) / 3 * 4 * numel / 1e6, rel=1e-3)


def test_stages_of_several_buckets_are_in_flight_together():
    # Each bucket sends twice, and four buckets one after the other would take eight latencies. Bucket 3 is sent when
    # bucket 1 has waited for bucket 0, one latency late; its own two follow.
    def program():
        both = (PeerMessages(((1, 10),), ((1, 10),)),)
        return Program((both,), ((Wait(0), both),), (Wait(1),), Ledger(2), True)

    link = Link(1e9, latency_seconds=0.01)
    seconds = simulate(Network(2, outer=link), [Bucket(0.0, [program()]) for _ in range(4)], 0.0, lambda work: 0.0)
    assert seconds == pytest.approx(0.03, rel=0.01)


def test_codecs_whose_messages_depend_on_values_are_refused():
    with pytest.raises(ValueError, match="cannot predict TernGrad"):
        record(tw.Mean(tw.TernGrad(shared=True)), SHAPES, [0], 4)


def test_a_rule_costs_an_all_gather():
    codec = tw.QSGD(bits=4)
    plain, robust = tw.Mean(codec, exchange="all_gather"), tw.Mean(codec, rule=tw.average.Krum(faulty=1))
    assert record(robust, SHAPES, [0], 8) == record(plain, SHAPES, [0], 8)
    assert record(on_nodes(robust, 4), SHAPES, [0], 8, workers_per_node=4) == record(plain, SHAPES, [0], 8)


def test_sparse_wins_on_a_slow_network_and_bytes_follow():
    network = Network(4, outer=Link.of("100mbit", "0.5ms"))
    by_name = {p.method: p for p in predict(20_000_000, 0.25, network)}
    dense, sparse = by_name["DDP, float32"], by_name["top-k 1 %, 4 bits, all_gather"]
    assert dense.bytes_out == pytest.approx(2 * 3 / 4 * 80e6, rel=1e-6)
    assert sparse.speedup_over_fp32 > 10 and sparse.speedup_over_bf16 > 5
    assert sparse.memory_bytes == 2 * 4 * 20_000_000
    assert dense.speedup_over_fp32 == 1.0
    local, every_step = by_name["every 4 steps, 4 bits"], by_name["4 bits, scatter_reduce"]
    assert local.bytes_out == pytest.approx(every_step.bytes_out / 4, rel=0.01)


def test_hierarchy_pays_where_workers_share_a_node():
    network = Network(16, 4, outer=Link.of("1gbit", "0.1ms"))
    by_name = {p.method: p for p in predict(20_000_000, 0.1, network)}
    assert by_name["4 bits, hierarchical"].step_seconds < by_name["4 bits, all_gather"].step_seconds / 4


def test_every_method_for_the_internet_is_planned_as_its_recipe_has_it():
    planned = [method.strategy for method in methods()]
    for end in ("diloco", "streaming-diloco", "sparseloco", "demo", "dion", "noloco", "muloco"):
        assert recipes()[f"text-gpt-{end}"].config.parsed_strategy() in planned, end


def test_local_rounds_cost_their_share_and_a_delay_hides_them():
    network = Network(4, outer=Link.of("100mbit", "0.5ms"))
    by_name = {p.method: p for p in predict(10_000_000, 0.25, network)}
    dense, diloco = by_name["DDP, float32"], by_name["DiLoCo, every 30"]
    assert diloco.bytes_out == pytest.approx(dense.bytes_out / 30)
    assert diloco.step_seconds == pytest.approx(0.25 + 1.5 * 40e6 / 12.5e6 / 30, rel=0.01)
    assert by_name["Streaming DiLoCo, every 30"].step_seconds == 0.25
    assert by_name["NoLoCo, every 30"].bytes_out == pytest.approx(2 * 40e6 / 30)
    assert diloco.bytes_out / by_name["SparseLoCo, every 15"].bytes_out > 30


def test_each_fragment_has_a_round_of_its_own():
    """An all-reduce of 2 steps for each of two halves, every 8 steps: each of them has the latencies of a whole round."""
    network, workload = Network(4, outer=Link(1e6, 0.01)), Workload((torch.Size([200, 100]),), 0.05)
    halves = tw.Local(tw.Mean(exchange="all_reduce"), every=8, fragments=2)
    seconds, num_bytes = predict_method(Method("halves", halves), workload, network, NO_WORK)
    assert seconds == pytest.approx(0.05 + 2 * 2 * (0.01 + 3 * 40_000 / 4 / 1e6) / 8)
    assert num_bytes == 2 * 3 / 4 * 80_000 / 8


PLAN_ALL = """
import sys
from thinwire.plan import Network, predict
predict(10_000, 0.1, Network(4))
predict(10_000, 0.1, Network(4, workers_per_node=2))
print("sympy" in sys.modules)
"""


def test_a_plan_does_not_import_the_compiler_of_pytorch():
    """Importing it takes longer than most plans."""
    ran = subprocess.run([sys.executable, "-c", PLAN_ALL], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"


def test_a_codec_that_follows_the_line_takes_the_most_bits_that_fit():
    """Of two candidates, that of more bytes where the line carries it beside computation, else the other one."""
    many, few = tw.QSGD(bits=8), tw.QSGD(bits=2)
    codecs = {"line": tw.Fitted("line", candidates=(many, few), wait_share=0.1), "many": many, "few": few}
    candidates = [
        tw.plan.Method(name, tw.Gradients(tw.Mean(codec, exchange="all_gather"))) for name, codec in codecs.items()
    ]
    for rate, expected in (("10gbit", "many"), ("200mbit", "few")):
        network = Network(4, outer=Link.of(rate, "0.1ms"))
        found = {p.method: p for p in predict(4_000_000, 0.2, network, candidates=candidates)}
        assert found["line"].bytes_out == found[expected].bytes_out
        assert found["line"].step_seconds == found[expected].step_seconds
    assert found["many"].step_seconds > 0.22  # so that the slower line left no choice


def test_a_fitted_codec_is_planned_by_its_budget():
    network = Network(4, outer=Link.of("1gbit", "0.1ms"))
    codecs = {"fitted": tw.Fitted(tw.QSGD(bits=3)), "single": tw.QSGD(bits=3)}
    candidates = [
        tw.plan.Method(name, tw.Gradients(tw.Mean(codec, tw.ErrorFeedback()))) for name, codec in codecs.items()
    ]
    found = {p.method: p.bytes_out for p in predict(1_000_000, 0.1, network, candidates=candidates)}
    assert found["fitted"] == found["single"]


def seconds_of_many_buckets(network, owned):
    (program, *others) = record(tw.Mean(exchange="scatter_reduce"), [torch.Size([65536])], range(4), 4, 1, owned)
    buckets = [Bucket(0.0, [program, *others]) for _ in range(40)]
    return simulate(network, buckets, 0.0, lambda work: 0.0, fold=False) / (40 * 4 * 65536 / 1e6)


def test_shares_take_the_time_of_the_closed_form_where_buckets_overlap():
    """One line of a quarter: 2(W-1)/W / (1/4) = 6 with equal shares, (k + W - 2) / sum b = 4 with those of its rate."""
    network = Network(4, outer=Link(1e6), uplinks=(1e6, 1e6, 1e6, 2.5e5))
    assert seconds_of_many_buckets(network, ()) == pytest.approx(6.0, rel=0.01)
    assert seconds_of_many_buckets(network, shares(network.uplinks)) == pytest.approx(4.0, rel=0.05)


def test_equal_uplinks_are_the_link_between_nodes():
    link = Link(1e7, 1e-3)
    plain = predict(100_000, 0.01, Network(4, outer=link))
    even = predict(100_000, 0.01, Network(4, outer=Link(1.0, 1e-3), uplinks=(1e7,) * 4))
    assert {p.method: p.step_seconds for p in even} == pytest.approx(
        {p.method: p.step_seconds for p in plain}, rel=0.01
    )
    with pytest.raises(ValueError, match="a rate for each of 4 nodes"):
        Network(4, uplinks=(1.0, 2.0))


def test_a_slow_line_slows_all_methods_and_shares_bear_it():
    uneven = Network(4, outer=Link.of("100mbit"), uplinks=(12.5e6, 12.5e6, 12.5e6, 2.5e6))
    even = Network(4, outer=Link.of("100mbit"))
    slow, fast = ({p.method: p.step_seconds for p in predict(20_000_000, 0.1, network)} for network in (uneven, even))
    assert slow["DDP, float32"] == pytest.approx(5 * fast["DDP, float32"], rel=0.05)
    name = "4 bits, scatter_reduce"
    assert 2.0 < slow[name] / fast[name] < 4.5


@pytest.mark.parametrize("strategy", [tw.Asynchronous(), tw.Shards()], ids=repr)
def test_strategies_without_rounds_are_refused(strategy):
    with pytest.raises(ValueError, match="a plan predicts strategies whose averager has rounds"):
        predict(1000, 0.1, Network(4), candidates=[Method("none", strategy)])


def test_a_quorum_is_refused():
    strategy = tw.strategy.asynchronous_diloco(every=10)
    with pytest.raises(
        ValueError, match="predicts workers that wait for each other, got Local.*; leave the quorum out"
    ):
        predict(1000, 0.1, Network(4), candidates=[Method("quorum", strategy)])


def test_a_topology_that_an_averager_refuses_has_its_own_name():
    pairs = Method("pairs", tw.Gossip(tw.Choco(tw.topology.RandomPairs())))
    with pytest.raises(ValueError, match=r"^Choco\(RandomPairs\(\), .*the graph must not change"):
        predict(1000, 0.1, Network(4), candidates=[pairs])


def test_names_of_candidates_are_their_own():
    network, (first, *_, last) = Network(2), methods()
    for candidates in ([replace(last, name=first.name)], [last, replace(first, name=last.name)]):
        with pytest.raises(ValueError, match=f"two methods have the name '{re.escape(candidates[0].name)}'"):
            predict(1000, 0.1, network, candidates=candidates)
    assert len(predict(1000, 0.1, network, candidates=[first, last])) == 3  # and the other dense method
