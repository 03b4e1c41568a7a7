"""`Mean` with a rule: who is left out, what is remembered, what is refused, and what travels."""

from __future__ import annotations

import warnings

import pytest
import torch

import thinwire as tw
from thinwire.average import Bucketing, CenteredClipping, GeometricMedian, Krum, Mean, Median, MedianNorm, TrimmedMean
from thinwire.average.robust.base import Messages
from thinwire.testing import check_averager

SHAPES = {"weight": (6, 8), "bias": (5,)}
N = 53


def gradients(rank, step=0):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [(name, torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()]


def flat(tensors):
    return torch.cat([t.reshape(-1) for _, t in tensors])


def run(averager, size, rounds=1, spoil=lambda rank, step, tensors: None, scale=1.0):
    """The results of all rounds, (rounds, n), the state, and whether the last round was committed, of each worker."""

    def worker(comm):
        state, results, committed = averager.init(gradients(comm.rank), comm, seed=1), [], None
        for step in range(rounds):
            tensors = [(name, t * scale) for name, t in gradients(comm.rank, step)]
            spoil(comm.rank, step, tensors)
            averager.step(state, tensors, comm, scale=scale).wait()
            committed = averager.commit(state)
            results.append(flat(tensors))
        return torch.stack(results), state, committed

    return tw.LocalWorld(size).run(worker)


def make_nan(bad):
    def spoil(rank, step, tensors):
        if rank in bad:
            tensors[0][1][0, 0] = float("nan")

    return spoil


@pytest.mark.parametrize(
    "averager",
    [
        Mean(rule=MedianNorm()),
        Mean(tw.chain(tw.TopK(0.1), tw.QSGD(bits=4)), tw.ErrorFeedback(), rule=CenteredClipping(tau=3.0)),
        Mean(tw.QSGD(bits=4), tw.ErrorFeedback(), granularity="bucket", rule=TrimmedMean(faulty=1)),
        Mean(tw.RandomK(0.2, shared=True), tw.ErrorFeedback(), rule=Median()),
        Mean(tw.TopK(0.1), tw.MomentumCorrection(0.9), rule=GeometricMedian()),
        Mean(memory=tw.MomentumCorrection(0.9), rule=Krum(faulty=1)),
        Mean(tw.codec.Cast(), rule=Bucketing(CenteredClipping(tau=3.0))),
        Mean(tw.Threshold(1.0), tw.ErrorFeedback(), rule=MedianNorm()),
    ],
    ids=repr,
)
def test_rules_keep_the_contract_of_averagers(averager):
    fewest = averager.rule.min_workers
    check_averager(averager, sizes=(fewest, fewest + 2))


@pytest.mark.parametrize(
    "rule", [MedianNorm(), Median(), TrimmedMean(faulty=1), GeometricMedian(), Krum(faulty=1)], ids=repr
)
def test_the_result_is_that_of_the_decoded_messages(rule):
    expected = rule.combine(Messages(torch.stack([flat(gradients(rank)) for rank in range(5)]), [48, 5])).result
    for results, _, committed in run(Mean(rule=rule), 5):
        assert committed and torch.equal(results[0], expected)


@pytest.mark.parametrize("memory", [None, tw.ErrorFeedback()])
def test_a_loss_scale_changes_no_bit_of_the_result(memory):
    """By a power of two; thresholds see unscaled messages, of tensors that travel encoded and dense."""
    averager = Mean(tw.codec.Cast(), memory, granularity="model", rule=CenteredClipping(tau=2.0))
    plain = run(averager, 3, rounds=3)[0][0]
    assert torch.equal(run(averager, 3, rounds=3, scale=1024.0)[0][0] / 1024.0, plain)


@pytest.mark.parametrize("rule", [MedianNorm(), TrimmedMean(faulty=1), Krum(faulty=1), GeometricMedian()], ids=repr)
def test_a_worker_that_is_not_finite_is_left_out_and_named(rule):
    rows = torch.stack([flat(gradients(rank)) for rank in (0, 1, 3, 4)])
    expected = rule.combine(Messages(rows, [48, 5], left_out=1)).result
    averager = Mean(rule=rule)
    for results, state, committed in run(averager, 5, spoil=make_nan([2])):
        assert committed and torch.equal(results[0], expected)
        assert averager.diagnostics(state)["not_finite/2"] == 1.0


def test_no_round_counts_where_more_than_half_are_not_finite():
    averager = Mean(tw.TopK(0.5), tw.ErrorFeedback(), rule=MedianNorm())
    assert [committed for *_, committed in run(averager, 4, spoil=make_nan([0, 1]))] == [True] * 4
    for results, state, committed in run(averager, 4, spoil=make_nan([0, 1, 3])):
        assert not committed and results[0].isnan().all()
        assert all(not t.any() for t in state.memory.residual.values())


def test_the_memory_of_a_worker_that_is_left_out_stays_as_it_was():
    averager = Mean(tw.TopK(0.5), tw.ErrorFeedback(), rule=MedianNorm())
    clean = run(averager, 3)
    spoiled = run(averager, 3, rounds=2, spoil=lambda rank, step, tensors: make_nan([1] * step)(rank, step, tensors))
    assert torch.equal(spoiled[1][1].memory.residual["weight"], clean[1][1].memory.residual["weight"])
    assert not torch.equal(spoiled[0][1].memory.residual["weight"], clean[0][1].memory.residual["weight"])


def test_a_message_that_cannot_be_decoded_is_left_out(monkeypatch):
    """An index beyond the tensor, which would end the round of all workers."""
    encode = tw.TopK.encode_segments

    def spoiled(self, segments, keys, residuals):
        payload = encode(self, segments, keys, residuals)
        if segments[0].view(-1)[0] == 7.0:
            payload[:] = 255
        return payload

    monkeypatch.setattr(tw.TopK, "encode_segments", spoiled)
    averager = Mean(tw.TopK(0.5), rule=MedianNorm())

    def seven(rank, step, tensors):
        if rank == 1:
            tensors[0][1][0, 0] = 7.0

    for results, state, committed in run(averager, 4, spoil=seven):
        assert committed and results[0].isfinite().all()
        assert averager.diagnostics(state) == pytest.approx(averager.diagnostics(state) | {"not_finite/1": 1.0})


def larger(bad):
    def spoil(rank, step, tensors):
        if rank in bad:
            for _, t in tensors:
                t.mul_(100.0)

    return spoil


@pytest.mark.parametrize(("spoil", "why"), [(make_nan([2]), "not finite"), (larger([2]), "clipped to less than half")])
def test_a_worker_that_is_always_wrong_is_set_aside_and_named_once(spoil, why):
    averager = Mean(rule=MedianNorm(patience=3))
    with pytest.warns(RuntimeWarning, match=f"rank 2 is set aside: its messages were {why} for 3 rounds") as warned:
        workers = run(averager, 5, rounds=6, spoil=spoil)
    assert len(warned) == 5  # once on each worker
    rows = torch.stack([flat(gradients(rank, 5)) for rank in (0, 1, 3, 4)])
    expected = averager.rule.combine(Messages(rows, [48, 5], left_out=1)).result
    for results, state, committed in workers:
        assert committed and torch.equal(results[5], expected)
        assert state.rule.set_aside == [2] and averager.diagnostics(state)["set_aside/2"] == 1.0


def test_no_worker_is_set_aside_where_the_bound_is_too_low_for_most():
    averager = Mean(rule=CenteredClipping(tau=0.01, patience=2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _, state, _ in run(averager, 5, rounds=4):
            assert state.rule.set_aside == [] and len(averager.diagnostics(state)) == 5


def test_those_who_are_left_stay_more_than_half():
    averager = Mean(rule=MedianNorm(patience=1))
    with pytest.warns(RuntimeWarning, match="set aside"):
        for _, state, _ in run(averager, 4, rounds=3, spoil=make_nan([1, 3])):
            assert state.rule.set_aside == [1]


def test_a_rule_follows_workers_to_their_new_ranks():
    averager = Mean(rule=TrimmedMean(faulty=1, patience=2))

    def worker(comm):
        tensors = gradients(comm.rank)
        state = averager.init(tensors, comm)
        state.rule.wrong_rounds, state.rule.set_aside = [0, 5, 2, 0], [1]
        averager.regroup(state, tensors, comm, [3, None, 1, 2])
        return state.rule.wrong_rounds, state.rule.set_aside

    assert tw.LocalWorld(4).run(worker) == [([0, 0, 5, 2], [2])] * 4


def test_the_center_is_kept_by_committed_rounds_alone():
    averager = Mean(rule=CenteredClipping(tau=1.0))

    def worker(comm):
        state, centers = averager.init(gradients(comm.rank), comm), []
        for step, end in enumerate((averager.commit, averager.discard, averager.commit)):
            tensors = gradients(comm.rank, 0 if step == 1 else step)
            averager.step(state, tensors, comm).wait()
            end(state)
            centers.append((flat(tensors), torch.cat(list(state.rule.center.values()))))
        return centers

    for first, second, third in tw.LocalWorld(3).run(worker):
        assert torch.equal(*first) and torch.equal(*third)
        assert torch.equal(second[1], first[1]) and not torch.equal(second[0], second[1])


@pytest.mark.parametrize("codec", [tw.codec.Identity(), tw.QSGD(bits=4), tw.TopK(0.1)], ids=repr)
def test_the_bytes_are_those_of_an_all_gather(codec):
    def worker(comm, rule):
        averager = Mean(codec, exchange="all_gather", rule=rule)
        tensors = gradients(comm.rank)
        state = averager.init(tensors, comm)
        before = comm.ledger.bytes_sent
        averager.step(state, tensors, comm).wait()
        averager.commit(state)
        return comm.ledger.bytes_sent - before

    world = tw.LocalWorld(5)
    encoded = 4 * N if codec.traits.sends_floats else codec.nbytes([48]) + 4 * 5
    assert world.run(worker, Krum(faulty=1)) == world.run(worker, None) == [4 * encoded] * 5


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: Mean(rule="Krum"), "rule must be a rule such as"),
        (lambda: Mean(rule=Median(), exchange="all_reduce"), "needs every worker's message; use exchange='all_gather'"),
        (lambda: Mean(tw.QSGD(bits=4), rule=Median(), exchange="scatter_reduce"), "needs every worker's message"),
        (lambda: Mean(rule=Median(), workers_per_node=2), "without workers_per_node"),
        (lambda: Mean(tw.TopK(0.1), rule=Median(), exchange="all_gather", divide_by="senders"), "send different"),
        (lambda: Mean(tw.TopK(0.1), rule=Krum(), exchange="all_gather", divide_by="senders"), "without .*divide_by"),
        (lambda: Mean(tw.TopK(0.1), rule=Bucketing(Median())), "workers send different coordinates"),
        (lambda: Mean(tw.RandomK(0.1), rule=TrimmedMean(faulty=1)), "workers send different coordinates"),
        (lambda: Mean(tw.Threshold(0.1), rule=TrimmedMean(faulty=1)), "workers send different coordinates"),
        (lambda: Mean(tw.SignSGD(), rule=Krum()), "workers vote"),
        (lambda: Mean(tw.ALQ(bits=3), rule=Krum()), "one wrong worker can choose"),
        (lambda: Mean(tw.TopK(0.1), tw.memory.EF21(), rule=Krum()), "needs the mean over all workers"),
        (lambda: Mean(clip=tw.average.ClipValueByGlobalNorm(), rule=Krum()), "can choose the norm"),
    ],
)
def test_what_does_not_suit_a_rule_is_refused_when_it_is_built(make, line):
    with pytest.raises(ValueError, match=line):
        make()


def test_too_few_workers_are_refused_in_one_line():
    def worker(comm):
        with pytest.raises(
            ValueError, match=rf"rank {comm.rank}: TrimmedMean\(faulty=2\) needs at least 5 workers, got 4"
        ):
            Mean(rule=TrimmedMean(faulty=2)).init(gradients(comm.rank), comm)

    tw.LocalWorld(4).run(worker)
