"""Other numbers of workers: what averagers remember is redistributed, handed over and cut anew, and no total is lost."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import thinwire as tw
from thinwire.membership import before_regrouping, keep_mean, load_shared, own_norm, redistribute, shared_part, untie

SHAPES = {"weight": (12, 8), "bias": (5,)}
GRADIENT_AVERAGERS = [
    tw.Mean(tw.chain(tw.TopK(0.1), tw.QSGD(bits=4)), tw.ErrorFeedback()),
    tw.Mean(tw.QSGD(bits=4), tw.ErrorFeedback(), exchange="scatter_reduce"),
    tw.Mean(tw.codec.SVD(rank=1), tw.ErrorFeedback(), exchange="scatter_reduce"),
    tw.dgc(0.1),
    tw.Mean(tw.TopK(0.1), tw.memory.EF21()),
    tw.Mean(tw.SignSGD(), tw.memory.LocalMomentum(), min_ndim=0),
    tw.Mean(tw.QSGD(bits=4), tw.memory.LoCo()),
    tw.PowerSGD(rank=1),
    tw.ByName({"w*": tw.PowerSGD(rank=1), "*": tw.Mean(tw.TopK(0.5), tw.ErrorFeedback(), min_ndim=0)}),
]


def tensors_of(rank: int, step: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [(name, torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()]


def rounds(comm, averager, steps, states=None, start=0):
    """Rounds on this communicator, from the states of more or fewer workers if given: state and sum of all results."""
    tensors = tensors_of(comm.rank, 0)
    state = averager.init(tensors, comm)
    if states is not None:
        redistribute(state, states, comm.rank, comm.size)
    total = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(start, start + steps):
        tensors = tensors_of(comm.rank, step)
        averager.step(state, tensors, comm).wait()
        assert averager.commit(state)
        for name, result in tensors:
            total[name] += result
    return state.state_dict(), total


@settings(max_examples=40, deadline=None)
@given(before=st.integers(1, 9), after=st.integers(1, 9))
def test_redistribution_keeps_the_mean_over_workers(before, after):
    parts = [torch.tensor([float(2**i), 1.0], dtype=torch.float64) for i in range(before)]
    new = [keep_mean(parts, rank, after) for rank in range(after)]
    torch.testing.assert_close(torch.stack(new).mean(0), torch.stack(parts).mean(0))
    if before == after:
        assert all(map(torch.equal, new, parts))


def late(averager, states) -> dict[str, torch.Tensor]:
    """What the results still owe to the gradients: 1/W sum_i e_i, and the owners' memory by coordinate."""
    memory = [state["memory"]["residual"] for state in states]
    owed = {name: torch.stack([m[name] for m in memory]).mean(0) for name in memory[0]}
    if states[0].get("owner_memory"):
        for name in owed:
            owed[name] += torch.cat([state["owner_memory"]["residual"][name] for state in states])
    return owed


@pytest.mark.parametrize("averager", GRADIENT_AVERAGERS[:3], ids=repr)
@pytest.mark.parametrize("after", [3, 6])
def test_results_and_what_is_late_add_up_to_all_gradients(averager, after):
    first = tw.LocalWorld(4).run(rounds, averager, 3)
    states = [state for state, _ in first]
    second = tw.LocalWorld(after).run(rounds, averager, 3, states, 3)
    owed = late(averager, [state for state, _ in second])
    gradients = [(4, step) for step in range(3)] + [(after, step) for step in range(3, 6)]
    for name in owed:
        sent = first[0][1][name] + second[0][1][name]
        means = [
            torch.stack([dict(tensors_of(r, step))[name] for r in range(size)]).mean(0) for size, step in gradients
        ]
        torch.testing.assert_close(sent.view(-1) + owed[name], sum(means).view(-1), rtol=1e-4, atol=1e-4)
        assert owed[name].any()


AUTO = tw.Mean(tw.QSGD(bits=4), tw.ErrorFeedback())  # by itself "scatter_reduce" on 8 workers, and another on 2


def owned(states) -> dict[str, torch.Tensor]:
    """What the owners of all pieces remember, by tensor."""
    parts = [state["owner_memory"]["residual"] for state in states]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def test_the_exchange_that_owners_remember_something_for_goes_on_with_fewer_workers():
    before = [state for state, _ in tw.LocalWorld(8).run(rounds, AUTO, 3)]

    def pair(comm):
        state = AUTO.init(tensors_of(0, 0), comm)
        assert state.exchange != "scatter_reduce" and state.owner_memory is None
        redistribute(state, before, comm.rank, comm.size)
        assert state.exchange == "scatter_reduce"
        return state.state_dict()

    after = tw.LocalWorld(2).run(pair)
    assert all(torch.equal(owned(after)[name], whole) and whole.any() for name, whole in owned(before).items())


def test_a_worker_that_joins_takes_over_the_exchange_and_its_pieces():
    states = {}

    def begin(comm):
        states[comm.rank] = state = AUTO.init(tensors_of(0, 0), comm)
        tensors = tensors_of(comm.rank, 0)
        AUTO.step(state, tensors, comm).wait()
        AUTO.commit(state)
        return state.state_dict()

    before = tw.LocalWorld(8).run(begin)
    states[8] = tw.LocalWorld(1).run(lambda alone: AUTO.init(tensors_of(0, 0), alone))[0]
    assert states[8].owner_memory is None
    load_shared(states[8], shared_part(states[0]))

    def go_on(comm):
        state, tensors = states[comm.rank], tensors_of(comm.rank, 1)
        AUTO.regroup(state, tensors, comm, [*range(8), None])
        saved = state.state_dict()
        AUTO.step(state, tensors, comm).wait()
        assert AUTO.commit(state)
        return saved, [t for _, t in tensors]

    after = tw.LocalWorld(9).run(go_on)
    now = owned([saved for saved, _ in after])
    assert all(torch.equal(now[name], whole) for name, whole in owned(before).items())
    assert all(torch.equal(a, b) for _, results in after for a, b in zip(results, after[0][1], strict=True))


@pytest.mark.parametrize("workers_per_node", [None, 2])
def test_every_worker_is_a_node_where_those_that_are_left_do_not_fill_nodes(monkeypatch, workers_per_node):
    averager = tw.Mean(exchange="hierarchical", workers_per_node=workers_per_node)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    states = tw.LocalWorld(4).run(lambda comm: averager.init(tensors_of(0, 0), comm))

    def survive(comm):
        state, tensors = states[comm.rank], tensors_of(comm.rank, 0)
        averager.regroup(state, tensors, comm, [0, 1, 2])
        averager.step(state, tensors, comm).wait()
        return state.workers_per_node, tensors[0][1]

    mean = sum(tensors_of(rank, 0)[0][1] for rank in range(3)) / 3
    for nodes, result in tw.LocalWorld(3).run(survive):
        assert nodes == 1
        torch.testing.assert_close(result, mean)


@pytest.mark.parametrize("averager", GRADIENT_AVERAGERS, ids=repr)
def test_workers_come_and_go_within_a_run(averager):
    """4 workers, of which 1 and 3 go on; then two others join: all get the same results, and the same as after a restart."""
    states = {}

    def begin(comm):
        tensors = tensors_of(comm.rank, 0)
        states[comm.rank] = state = averager.init(tensors, comm)
        several(state, comm, 0)

    def several(state, comm, start):
        results = []
        for step in range(start, start + 2):
            tensors = tensors_of(comm.rank, step)
            averager.step(state, tensors, comm).wait()
            assert averager.commit(state)
            results += [t for _, t in tensors]
        return results

    def survive(comm):
        state = states[(1, 3)[comm.rank]]
        averager.regroup(state, tensors_of(0, 0), comm, [1, 3])
        return state, several(state, comm, 2)

    def grow(comm):
        lone = tw.LocalWorld(1).run(lambda alone: averager.init(tensors_of(7, 0), alone))[0]
        state = survivors[comm.rank][0] if comm.rank < 2 else lone
        shared = shared_part(survivors[0][0])
        comm.barrier()
        if comm.rank >= 2:
            load_shared(state, shared)
            assert own_norm(state) == 0
        averager.regroup(state, tensors_of(0, 0), comm, [0, 1, None, None])
        return several(state, comm, 4)

    tw.LocalWorld(4).run(begin)
    survivors = tw.LocalWorld(2).run(survive)
    assert own_norm(survivors[0][0]) > 0
    for results in (*[[r for _, r in survivors]], tw.LocalWorld(4).run(grow)):
        assert all(torch.equal(a, b) for other in results for a, b in zip(other, results[0], strict=True))


@pytest.mark.parametrize(
    "averager",
    [
        tw.Mix(tw.Exponential()),
        tw.Mix(tw.topology.Torus()),
        tw.PushSum(tw.Exponential()),
        tw.Choco(tw.Ring(), tw.TopK(0.5), step_size=0.3),
        tw.DeepSqueeze(tw.Ring(), tw.QSGD(bits=8, bucket_size=8), step_size=0.3),
        tw.PowerGossip(tw.Ring(), rank=1, iterations=2),
        tw.Moniqua(tw.Ring(), theta=8.0, bits=8),
    ],
    ids=repr,
)
@pytest.mark.filterwarnings("ignore:.*cannot connect:UserWarning")
def test_gossip_goes_on_among_the_living_and_keeps_their_mean(averager):
    states, values = {}, {}

    def begin(comm):
        values[comm.rank] = tensors = tensors_of(comm.rank, 0)
        states[comm.rank] = averager.init(tensors, comm)
        several(comm, states[comm.rank], tensors)

    def several(comm, state, tensors, times=3):
        for _ in range(times):
            averager.step(state, tensors, comm).wait()
            averager.commit(state)

    def survive(comm, ranks, old, times):
        """`ranks` go on; those of them that are not among the `old` are new."""
        me = ranks[comm.rank]
        before = [old.index(r) if r in old else None for r in ranks]
        if before[comm.rank] is None:
            values[me] = [(name, t.clone()) for name, t in tensors_of(me, 0)]
            states[me] = tw.LocalWorld(1).run(lambda alone: averager.init(values[me], alone))[0]
            load_shared(states[me], shared_part(states[old[0]]))
        comm.barrier()
        state, tensors = states[me], values[me]
        for _, t in tensors:  # strategies hold the estimate z between rounds
            t.mul_(averager.debias_factor(state))
        averager.regroup(state, tensors, comm, before)
        weight = state.weight
        for _, t in tensors:
            t.mul_(weight)
        start = torch.cat([t.reshape(-1) for _, t in tensors])
        several(comm, state, tensors, times)
        end = torch.cat([t.reshape(-1) for _, t in tensors])
        return start, end, weight

    tw.LocalWorld(6).run(begin)
    for ranks, old in ([0, 2, 5], [0, 1, 2, 3, 4, 5]), ([0, 2, 5, 6, 7], [0, 2, 5]):
        results = tw.LocalWorld(len(ranks)).run(survive, ranks, old, 30)
        starts, ends = (torch.stack([r[i] for r in results]) for i in (0, 1))
        assert sum(r[2] for r in results) == pytest.approx(len(ranks))
        torch.testing.assert_close(ends.mean(0), starts.mean(0), rtol=1e-3, atol=2e-2)
        assert (ends - ends.mean(0)).norm() < 0.7 * (starts - starts.mean(0)).norm()


def test_regrouping_that_fails_goes_back_without_copies_of_own_memory():
    def worker(comm):
        state = tw.Mean(tw.TopK(0.5), tw.ErrorFeedback()).init([("x", x)], comm)
        shifted = tw.Mean(tw.TopK(0.5), tw.memory.EF21()).init([("x", x)], comm)
        shifted.memory.estimate["x"] += 1
        for old in (state, shifted):
            kept = before_regrouping(old)
            untie(old)
            old.exchange = "another"
            yield old, kept

    x = torch.zeros(7, 2)
    (own, kept), (tied, copied) = tw.LocalWorld(1).run(lambda comm: list(worker(comm)))[0]
    assert kept.memory.residual["x"] is own.memory.residual["x"] and kept.exchange != "another"
    assert kept.memory.residual is not own.memory.residual  # a commit swaps them
    assert not tied.memory.estimate["x"].any() and (copied.memory.estimate["x"] == 1).all()


def test_the_norm_of_own_memory_is_that_of_all_its_elements():
    memory = torch.randn(300_000, generator=torch.Generator().manual_seed(0))

    def worker(comm):
        state = tw.Mean(tw.TopK(0.5), tw.ErrorFeedback()).init([("x", memory.view(300, 1000))], comm)
        state.memory.residual["x"].copy_(memory)
        return own_norm(state)

    assert tw.LocalWorld(1).run(worker)[0] == pytest.approx(math.sqrt(math.fsum(v * v for v in memory.tolist())), 1e-14)


@pytest.mark.parametrize(
    "taken", [{0: [0], 1: [1], 2: [2]}, {0: [0, 1, 2], 1: [0, 1, 2]}, {0: [0], 1: [1, 2], 2: [1, 2]}]
)
def test_owners_of_pieces_that_load_alone_have_each_piece_once_together(taken):
    """Workers of an elastic run load what lies on their own disks; the first round adds up what they have."""
    averager, x = tw.parse("Mean(QSGD(bits=4), ErrorFeedback(), exchange='scatter_reduce')"), torch.zeros(7, 2)

    def saved(comm):
        state = averager.init([("x", x)], comm)
        memory = state.owner_memory
        memory.residual["x"] += torch.arange(1.0, 15)[memory.place("x", comm.rank, comm.size)]
        return state.state_dict()

    def loaded(comm):
        found = []
        for worker, ranks in taken.items():
            state = averager.init([("x", x)], comm)
            sharers = [w for w, theirs in taken.items() if theirs == ranks]
            place = (sharers.index(worker), len(sharers))
            redistribute(state, [states[rank] for rank in ranks], *place, [(rank, 3) for rank in ranks])
            found.append(state.owner_memory.residual["x"])
        return sum(found)

    states = tw.LocalWorld(3).run(saved)
    (total,) = tw.LocalWorld(1).run(loaded)
    assert total.tolist() == list(range(1, 15))
