"""Layouts of workers on measured lines: what follows from lines, and averaging in another order with unequal shares."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from helpers.spawn import WORLDS, spawn
from torch import nn

import thinwire as tw
from thinwire.average.mean.exchange.scatter_reduce import shard_nbytes
from thinwire.comm import Layout, ProcessGroupCommunicator, laid_out
from thinwire.plan import Lines, layout_of

ORDER = (2, 0, 1)
SHARES = (0.5, 0.0, 0.5)
SHAPES = {"weight": (11, 13), "tiny": (1, 2), "bias": (7,)}
CODECS = [tw.codec.Identity(), tw.QSGD(bits=4), tw.TopK(0.1), tw.chain(tw.TopK(0.1), tw.QSGD(bits=4))]


def square(size, value):
    return [[0.0 if i == j else value(i, j) for j in range(size)] for i in range(size)]


# ---- what follows from lines ----


def test_equal_lines_leave_all_as_it_is():
    noisy = square(4, lambda i, j: 1e8 * (1 + 0.05 * ((i + 2 * j) % 3)))
    assert layout_of(Lines.of_rates(noisy, square(4, lambda i, j: 5e-4))) == Layout((0, 1, 2, 3))


def test_a_slow_worker_owns_less():
    slow = layout_of(Lines.of_rates(square(4, lambda i, j: 25.0 if 3 in (i, j) else 100.0)))
    assert slow.shares == pytest.approx((1 / 3, 1 / 3, 1 / 3, 0))
    asymmetric = layout_of(Lines.of_rates(square(4, lambda i, j: 25.0 if i == 3 else 100.0)))
    assert asymmetric.shares == slow.shares  # what it sends is as much as what it receives


def test_sites_are_runs_of_ranks_led_by_the_fastest_line_out():
    site = (0, 1, 0, 1, 2, 2)
    rates = square(6, lambda i, j: (2.0 if i in (2, 3, 4) else 1.0) * (10.0 if site[i] == site[j] else 1.0))
    trips = square(6, lambda i, j: 5e-4 if site[i] == site[j] else 0.05)
    layout = layout_of(Lines.of_rates(rates, trips))
    assert layout.workers_per_node == 2
    assert layout.order[::2] == (2, 3, 4) and sorted(layout.order) == list(range(6))
    assert all(site[layout.order[i]] == site[layout.order[i + 1]] for i in (0, 2, 4))


def test_unequal_sites_are_no_nodes():
    trips = square(5, lambda i, j: 5e-4 if (i < 3) == (j < 3) else 0.05)
    assert layout_of(Lines.of_rates(square(5, lambda i, j: 1.0), trips)).workers_per_node == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"order": (0, 0)}, "each rank below 2 once"),
        ({"order": (0, 1, 2), "workers_per_node": 2}, "must divide the 3 workers"),
        ({"order": (0, 1), "shares": (0.5, 0.6)}, "add up to 1"),
        ({"order": (0, 1), "shares": (1.0,)}, "2 numbers"),
    ],
)
def test_an_impossible_layout_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Layout(**fields)


# ---- ranks ----


def new_ranks(comm):
    before, own = comm.rank, torch.tensor([float(comm.rank)])
    groups = dist.distributed_c10d._world.pg_map
    others = len(groups) - isinstance(comm, ProcessGroupCommunicator)  # which is closed, and its group with it
    comm = laid_out(comm, Layout(ORDER))
    assert comm.rank == ORDER.index(before) and comm.size == 3 and comm.ledger.bytes_sent == 0
    gathered = torch.cat(comm.all_gather(own).wait()).tolist()
    total = comm.all_reduce(own.clone()).wait().item()
    token = torch.tensor([float(before)])
    comm.broadcast(token, root=1).wait()
    got = torch.empty(1)
    comm.exchange({(comm.rank + 1) % 3: own}, {(comm.rank - 1) % 3: got}).wait()
    sent = comm.ledger.bytes_sent, comm.ledger.messages
    comm.close()
    assert len(groups) == others
    return gathered, total, token.item(), got.item() == ORDER[(ORDER.index(before) - 1) % 3], sent


@pytest.mark.parametrize("world", WORLDS)
def test_ranks_follow_the_order_in_every_operation(world):
    for gathered, total, token, from_before, _ in WORLDS[world](3, new_ranks):
        assert gathered == list(ORDER) and total == 3.0 and token == ORDER[1] and from_before


def differing(comm):
    with pytest.raises(ValueError, match="workers disagree on 1 of 1 settings"):
        laid_out(comm, Layout((0, 1) if comm.rank else (1, 0)))
    with pytest.raises(ValueError, match="a layout of 3 workers does not suit 2"):
        laid_out(comm, Layout(ORDER))


def test_workers_that_differ_in_their_layouts_are_told():
    tw.LocalWorld(2).run(differing)


# ---- unequal shares ----


def tensors(rank, step):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return [(name, torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()]


def rounds(comm, averager, shares, num=4, state=None):
    comm.layout = Layout(tuple(range(comm.size)), shares=shares)
    state = averager.init(tensors(comm.rank, 0), comm) if state is None else state
    results = []
    for step in range(num):
        now = tensors(comm.rank, step)
        averager.step(state, now, comm).wait()
        assert averager.commit(state)
        results.append(dict(now))
    return results, state.state_dict(), comm.ledger.snapshot()


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("granularity", ["layer", "model"])
def test_with_unequal_shares_nothing_is_lost_and_all_have_the_same_bits(codec, granularity):
    averager = tw.Mean(codec, tw.ErrorFeedback(), granularity, exchange="scatter_reduce")
    everyone = tw.LocalWorld(3).run(rounds, averager, SHARES)
    for results, _, _ in everyone:
        assert all(torch.equal(r[name], f[name]) for r, f in zip(results, everyone[0][0], strict=True) for name in r)
    for name in ("weight", "tiny"):
        given = sum(dict(tensors(rank, step))[name].double() for rank in range(3) for step in range(4))
        kept = sum(state["memory"]["residual"][name].double() for _, state, _ in everyone)
        owned = [state["owner_memory"]["residual"][name].double() for _, state, _ in everyone]
        assert owned[1].numel() == 0
        sent = 3 * sum(results[name].double() for results in everyone[0][0])
        total = sent.view(-1) + kept.view(-1) + 3 * torch.cat(owned)
        torch.testing.assert_close(total, given.view(-1), rtol=0, atol=1e-4)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("shares", [SHARES, (0.2, 0.7, 0.1)])
def test_the_ledger_holds_to_the_formula_with_unequal_shares(codec, shares):
    averager = tw.Mean(codec, exchange="scatter_reduce")
    is_dense = codec.traits.sends_floats
    encoded = [torch.Size(s) for s in SHAPES.values() if len(s) > 1 or is_dense]
    m = shard_nbytes(codec, encoded, 0 if is_dense else 7, 3, merged=False, shares=shares)
    for rank, (_, _, ledger) in enumerate(tw.LocalWorld(3).run(rounds, averager, shares, 1)):
        assert ledger.collectives["all_to_all"].bytes_sent == sum(m) - m[rank]
        assert ledger.collectives["all_gather"].bytes_sent == 2 * m[rank]


def test_bytes_follow_the_shares():
    """Worker s moves n (1 + (W-2) f_s) each way."""
    n, shares = 4 * 30_000, (0.5, 0.3, 0.2, 0.0)

    def sent(comm):
        comm.layout = Layout((0, 1, 2, 3), shares=shares)
        averager, values = tw.Mean(exchange="scatter_reduce"), [("x", torch.ones(30_000))]
        state = averager.init(values, comm)
        before = comm.ledger.bytes_sent
        averager.step(state, values, comm).wait()
        return comm.ledger.bytes_sent - before

    assert tw.LocalWorld(4).run(sent) == pytest.approx([n * (1 + 2 * f) for f in shares])


def test_owned_memory_moves_to_other_shares_and_other_workers():
    averager = tw.Mean(tw.TopK(0.1), tw.ErrorFeedback(), exchange="scatter_reduce")
    saved = [state for _, state, _ in tw.LocalWorld(3).run(rounds, averager, SHARES)]
    whole = torch.cat([state["owner_memory"]["residual"]["weight"] for state in saved])
    assert whole.any()

    def resumed(comm, shares):
        comm.layout = Layout(tuple(range(comm.size)), shares=shares) if shares else None
        state = averager.init(tensors(comm.rank, 0), comm)
        tw.membership.redistribute(state, saved, comm.rank, comm.size)
        return state.owner_memory.residual["weight"]

    for shares in ((), (0.9, 0.1)):
        assert torch.equal(torch.cat(tw.LocalWorld(2).run(resumed, shares)), whole)

    def regrouped(comm):
        _, _, _ = rounds(comm, averager, SHARES, 0)
        state = averager.init(tensors(comm.rank, 0), comm)
        state.load_state_dict(saved[comm.rank])
        comm.layout = None
        averager.regroup(state, tensors(comm.rank, 0), comm)
        return state.shares, state.owner_memory.residual["weight"]

    shares, parts = zip(*tw.LocalWorld(3).run(regrouped), strict=True)
    assert shares == ((), (), ()) and torch.equal(torch.cat(parts), whole)
    assert [part.numel() for part in parts] == [48, 48, 47]


def test_a_layout_says_which_ranks_share_a_site():
    def bytes_out(comm):
        comm.layout = Layout((0, 1, 2, 3), workers_per_node=2)
        values = [("x", torch.ones(64, 64))]
        for exchange in ("hierarchical", "auto"):
            averager = tw.Mean(tw.QSGD(bits=4), exchange=exchange)
            assert averager.init(values, comm).workers_per_node == 2
        return True

    assert tw.LocalWorld(4).run(bytes_out) == [True] * 4


# ---- strategies ----


def trained(comm, layout):
    torch.manual_seed(0)
    model = nn.Linear(6, 3, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = tw.Gradients(tw.Mean(exchange="scatter_reduce"))
    with tw.attach(model, optimizer, strategy, layout=layout) as handle:
        generator = torch.Generator().manual_seed(comm.rank)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 6, generator=generator)).square().mean().backward()
            optimizer.step()
        handle.settle()
        return handle.comm.rank, handle.comm.layout, model.weight.detach()


def test_a_strategy_in_another_order_with_shares_trains_as_in_the_order_of_ranks():
    plain = spawn(3, trained, None)
    found = spawn(3, trained, Layout(ORDER, shares=SHARES))
    assert [rank for rank, _, _ in found] == [ORDER.index(rank) for rank in range(3)]
    for _, _, weight in found:
        assert torch.equal(weight, found[0][2])
        torch.testing.assert_close(weight, plain[0][2], rtol=1e-5, atol=1e-6)  # the same terms, added in another order


def measured(comm, _):
    return trained(comm, "measured")[1]


def test_measured_layouts_are_the_same_on_all_workers():
    layouts = spawn(2, measured, None)
    assert layouts[0] == layouts[1] and sorted(layouts[0].order) == [0, 1] and layouts[0].shares == ()


def refused(comm):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match='layout must be a Layout, "measured" or None'):
        tw.attach(model, optimizer, tw.Gradients(tw.Mean()), layout=ORDER)
    with pytest.raises(ValueError, match="layout is for the communicator that is made here"):
        tw.attach(model, optimizer, tw.Gradients(tw.Mean()), comm=comm, layout=Layout((0,)))


def test_what_a_layout_does_not_suit_is_refused():
    tw.LocalWorld(1).run(refused)
