"""The work that a plan notes: of averagers of low rank by name and rank, and of transforms; measured, or assumed."""

import networkx
import pytest
import torch

import thinwire as tw
from thinwire.average import Dion
from thinwire.lab.bench.plan import measured_speeds
from thinwire.plan import Method, Speeds, methods
from thinwire.plan.averagers import multiplies
from thinwire.plan.record import record
from thinwire.plan.sized import MEMORY, Work
from thinwire.schedule import Values

SHAPES = [torch.Size([64, 96]), torch.Size([96])]
NUMEL = 64 * 96 + 96


def works(averager):
    (program,) = record(averager, SHAPES, [0], 2)
    return [action for action in program.actions if isinstance(action, Work)]


def test_a_round_has_the_work_of_the_last_rank_of_a_schedule():
    scheduled = tw.PowerSGD(rank=Values((4, 3), every=10, unit="step"))
    expected = [Work(part, NUMEL, "PowerSGD(rank=3)", 3) for part in ("encode", "decode")]
    assert works(scheduled) == works(tw.PowerSGD(rank=3)) == expected


@pytest.mark.parametrize("averager", [tw.PowerSGD(rank=2), Dion(rank=8), tw.PowerGossip(rank=3)], ids=repr)
def test_every_averager_of_low_rank_notes_its_name_and_rank(averager):
    assert {(work.name, work.rank) for work in works(averager)} == {(repr(averager), averager.rank)}


@pytest.mark.parametrize("kind", [tw.PowerSGD, Dion, tw.PowerGossip])
def test_assumed_seconds_grow_by_as_much_for_each_column(kind):
    speeds = Speeds(copy_bytes_per_second=1e9)
    seconds = {
        rank: [speeds.seconds(Work(part, 10**6, repr(kind(rank=rank)), rank)) for part in ("encode", "decode")]
        for rank in (1, 3, 5)
    }
    for first, second, third in zip(seconds[1], seconds[3], seconds[5], strict=True):
        assert third - second == pytest.approx(second - first, abs=1e-9)
    assert sum(seconds[1]) >= 2 * 4e6 / 1e9  # each reads the matrices at least twice, and writes them
    assert sum(seconds[5]) > sum(seconds[1])


def test_an_averager_of_one_s_own_counts_as_power_sgd_does():
    own, known = (Work("decode", 1000, name, 4) for name in ("Mine(rank=4)", "PowerSGD()"))
    assert Speeds().seconds(own) == Speeds().seconds(known) != Speeds().seconds(Work("decode", 1000, "MyCodec()"))


def test_what_is_measured_takes_the_place_of_what_is_assumed():
    strategy = tw.Gradients(tw.PowerSGD(rank=2))
    stars = tw.Gossip(tw.PowerGossip(tw.topology.from_networkx(networkx.path_graph(6))))
    others = [Method(repr(s), s) for s in (strategy, stars)]
    speeds = measured_speeds(20_000, others)
    measured = {repr(m.strategy.averager) for m in methods() if multiplies(m.strategy.averager)} | {"PowerSGD(rank=2)"}
    assert {name for name in speeds.shares if "rank" in name or name in measured} == measured  # not of six workers
    assert all(share.encode > 0 and share.decode > 0 for share in speeds.shares.values())
    assert speeds.shares[MEMORY] != Speeds().shares[MEMORY]
    work = Work("decode", 1000, "PowerSGD(rank=2)", 2)
    assert speeds.seconds(work) == 4000 / speeds.copy_bytes_per_second / speeds.shares["PowerSGD(rank=2)"].decode


def test_a_mean_of_coordinates_goes_through_a_transform_once():
    def decoded(codec, by):
        found = works(tw.Mean(codec, exchange="all_gather", divide_by=by))
        return sum(work.numel for work in found if work.part == "decode")

    blocks = tw.codec.BlockwiseTopK(0.25, block=64)
    transformed = tw.chain(tw.codec.DCT(8), blocks)
    assert decoded(transformed, "senders") == 64 * 96
    assert decoded(transformed, "workers") == decoded(blocks, "senders") == 2 * 64 * 96
