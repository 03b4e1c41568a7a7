"""Asynchronous local updates: against the synchronous ones, float64 references, and workers that are slow, stuck or dead."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from helpers.program import wait_until
from helpers.spawn import WORLDS, run_threads, spawn
from strategy.test_local_updates import adamw, backward, flat, make_model

import thinwire as tw
from thinwire.strategy import CosineGate, DelayedNesterov, OuterSGD
from thinwire.strategy.local import asynchronous
from thinwire.strategy.local.quorum import Quorum, StepTimer, steps_of

AVERAGERS = [
    "Mean(exchange='all_gather')",
    "Mean(TopK(0.3), ErrorFeedback(), exchange='all_gather')",
    "Mean(chain(TopK(0.5), QSGD(bits=4)), ErrorFeedback(), min_ndim=0, exchange='all_gather')",
]


def train(comm, strategy, steps, tokens=None):
    """A model of its own on each worker, made equal to rank 0's; returns it before and after `synchronize`."""
    model = make_model(seed=comm.rank)
    optimizer = adamw(model)
    handle = tw.attach(model, optimizer, strategy, comm=comm, seed=3)
    for step in range(steps):
        backward(model, comm.rank, step)
        if tokens is not None:
            handle.count_tokens(tokens[comm.rank])
        optimizer.step()
    before = flat(model).clone()
    handle.synchronize()
    committed = handle.committed if handle.strategy.quorum else None
    handle.detach()
    return before, flat(model), committed, handle.ledger.as_dict()


# ---- with equal speeds, all workers, and no delay ----


@pytest.mark.parametrize(
    ("world", "averager"), [("processes", AVERAGERS[-1]), *(("threads", averager) for averager in AVERAGERS)]
)
def test_all_workers_in_each_round_are_local_updates_bit_for_bit(world, averager):
    text = f"Local({averager}, every=5, outer=OuterSGD(), fragments=2"
    quorum = "Quorum(workers=3, stale=PlainWeights(), follow_speed=False, rule=None)"
    expected = run_threads(3, train, tw.parse(text + ")"), 22)
    results = WORLDS[world](3, train, tw.parse(f"{text}, quorum={quorum})"), 22)
    for (before, after, committed, _), (as_before, as_after, _, _) in zip(results, expected, strict=True):
        assert torch.equal(before, as_before) and torch.equal(after, as_after)
        assert committed.tokens == 2 * 3 * 22 and committed.num_late == committed.num_dropped == 0


class Clocks:
    """A clock for each thread, which only steps advance: worker r needs `seconds[r]` for each."""

    def __init__(self, monkeypatch, seconds):
        self.seconds, self.own = seconds, threading.local()
        monkeypatch.setattr(StepTimer, "now", staticmethod(lambda: getattr(self.own, "now", 0.0)))

    def step(self, rank):
        self.own.now = getattr(self.own, "now", 0.0) + self.seconds[rank]


def paced(comm, strategy, steps, clocks):
    model = make_model(seed=comm.rank)
    optimizer = adamw(model)
    handle = tw.attach(model, optimizer, strategy, comm=comm)
    taken = 0
    for step in range(steps[comm.rank]):
        backward(model, comm.rank, step)
        clocks.step(comm.rank)
        optimizer.step()
        taken += 1
    every, delay = handle._asynchronous.every, handle._asynchronous.delay
    handle.synchronize()
    handle.detach()
    return flat(model), every, delay, handle.committed


def test_equal_speeds_keep_every_and_so_the_bits(monkeypatch):
    clocks = Clocks(monkeypatch, [0.1, 0.1, 0.1])
    text = "Local(Mean(exchange='all_gather'), every=4, outer=OuterSGD()"
    expected = run_threads(3, train, tw.parse(text + ")"), 20)
    results = run_threads(
        3, paced, tw.parse(f"{text}, quorum=Quorum(workers=3, stale=PlainWeights(), rule=None))"), [20] * 3, clocks
    )
    for (x, every, _, _), (_, after, _, _) in zip(results, expected, strict=True):
        assert every == 4 and torch.equal(x, after)


def test_a_worker_of_half_the_speed_takes_half_the_steps_and_counts_half(monkeypatch):
    clocks = Clocks(monkeypatch, [0.125, 0.25, 0.125])
    strategy = tw.parse("Local(Mean(), every=8, outer=OuterSGD(), delay=4, quorum=Quorum(workers=3))")
    results = run_threads(3, paced, strategy, [8 * 9, 8 + 4 * 8, 8 * 9], clocks)
    assert [every for _, every, _, _ in results] == [8, 4, 8]
    assert [delay for _, _, delay, _ in results] == [4, 2, 4]
    assert all(torch.equal(x, results[0][0]) for x, _, _, _ in results)
    committed = results[0][3]
    assert committed.tokens == 2 * 8 * 9 + 8 + 4 * 8


def slowed_down(comm, strategy, clocks, seconds):
    """Trains with a step of each of these durations; returns how many steps there were from one round to the next."""
    model = make_model()
    optimizer = adamw(model)
    found = set()
    with tw.attach(model, optimizer, strategy, comm=comm) as handle:
        for step, clocks.seconds[0] in enumerate(seconds):
            backward(model, 0, step)
            clocks.step(0)
            optimizer.step()
            found.add(handle._asynchronous.every)
        handle.synchronize()
    return found


def test_the_fastest_worker_keeps_every_when_it_gets_slower(monkeypatch):
    strategy = tw.parse("Local(Mean(), every=4, outer=OuterSGD(), quorum=Quorum())")
    (found,) = run_threads(1, slowed_down, strategy, Clocks(monkeypatch, [0.0]), [0.1] * 8 + [0.2] * 120)
    assert found == {4}


def test_steps_follow_the_speed():
    assert [steps_of(30, v, [1.0, 2.0, 3.0]) for v in (1.0, 2.0, 3.0, 0.0, 0.01)] == [10, 20, 30, 30, 1]


# ---- equations ----


@pytest.mark.parametrize("period", [1, 3])
def test_n_changes_with_delayed_nesterov_are_one_nesterov_step_on_their_mean(period):
    changes = torch.randn(4 * period, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    anchor = torch.nn.Parameter(torch.zeros(7, dtype=torch.float64))
    optimizer = DelayedNesterov(period=period).outer(OuterSGD(lr=0.7, momentum=0.9), size=99)([anchor])
    expected, v = torch.zeros(7, dtype=torch.float64), torch.zeros(7, dtype=torch.float64)
    for i, change in enumerate(changes):
        anchor.grad = change.clone()
        optimizer.step()
        if (i + 1) % period == 0:
            mean = changes[i + 1 - period : i + 1].mean(0)
            v = 0.9 * v + mean
            expected -= 0.7 * (mean + 0.9 * v)
            assert torch.allclose(anchor.detach(), expected, rtol=0, atol=1e-13)


def recorded(comm, strategy, steps, log):
    """`train` with steps of unequal number; rank 0 records what its rounds merge, decoded, and where its anchor is then."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = tw.attach(model, optimizer, strategy, comm=comm)
    if comm.rank == 0:
        commit = handle._asynchronous._commit

        def commit_and_record(fragment, one):
            result = commit(fragment, one)
            anchor = torch.cat([a.detach().reshape(-1) for _, a in fragment.anchors]).double()
            log.append((one, anchor))
            return result

        handle._asynchronous._commit = commit_and_record
    start = torch.cat([a.detach().reshape(-1) for _, a in handle._fragments[0].anchors]).double()
    for step in range(steps[comm.rank]):
        backward(model, comm.rank, step)
        handle.count_tokens(1 + comm.rank)
        optimizer.step()
    handle.synchronize()
    handle.detach()
    return start


def clipped_to_median_norm(vectors, numels):
    """Each tensor of each vector times min(1, median norm / own norm)."""
    parts = []
    for tensors in zip(*(vector.split(numels) for vector in vectors), strict=True):
        median = sorted(t.norm() for t in tensors)[(len(tensors) - 1) // 2]
        parts.append([t * min(1.0, float(median / t.norm())) for t in tensors])
    return [torch.cat(own) for own in zip(*parts, strict=True)]


@pytest.mark.parametrize(
    ("stale", "workers"),
    [
        ("DelayedNesterov()", 1),
        ("DelayedNesterov()", 3),
        ("CosineGate(cutoff=2)", 1),
        ("PlainWeights()", 3),
        ("Drop()", 1),
    ],
)
def test_rounds_are_their_equations_in_float64(stale, workers):
    """Whichever changes a round merges, clipping, weights, gates and outer steps are those of a plain simulation."""
    rule, log = tw.parse(stale), []
    strategy = tw.parse(
        "Local(Mean(), every=4, outer=OuterSGD(lr=0.5, momentum=0.8), delay=2, "
        f"quorum=Quorum(workers={workers}, stale={stale}, follow_speed=False, rule=MedianNorm()))"
    )
    x = run_threads(3, recorded, strategy, [40, 24, 32] if workers == 1 else [40] * 3, log)[0]
    numels = [p.numel() for p in make_model().parameters()]
    assert workers == 1 or any(len(one.shares) == 3 for one, _ in log)
    v, b, changes = torch.zeros_like(x), torch.zeros_like(x), 0
    assert len(log) >= 10
    for one, anchor in log:
        vectors = [s.message.view(torch.float32).double() for s in one.shares]
        factors = [rule.factor(one.version - 1 - s.base) for s in one.shares]
        total = sum(s.tokens for s, f in zip(one.shares, factors, strict=True) if f > 0)
        if sum(f > 0 for f in factors) > 2:
            vectors = clipped_to_median_norm(vectors, numels)
        weighted = [f * s.tokens / total * d for f, s, d in zip(factors, one.shares, vectors, strict=True) if f > 0]
        if not weighted:
            pass
        elif isinstance(rule, DelayedNesterov):
            for d in weighted:
                d = len(weighted) * d
                b, changes, x = b + d, changes + 1, x - 0.5 * d / 3
                if changes % 3 == 0:
                    v = 0.8 * v + b / 3
                    x, b = x - 0.5 * 0.8 * v, torch.zeros_like(b)
        else:
            g = sum(weighted)
            v = 0.8 * v + g
            x = x - 0.5 * (g + 0.8 * v)
        assert torch.allclose(anchor, x, rtol=0, atol=1e-5)  # float32 anchors, some 30 steps
        assert [s.worker for s in one.shares] == sorted(s.worker for s in one.shares)


def test_the_gate_and_the_grace_window():
    assert [round(CosineGate(cutoff=2, decay=1.0).factor(s), 6) for s in range(3)] == [1.0, 0.18394, 0.0]
    quorum = Quorum(grace=0.5, max_grace_seconds=2.0)
    assert quorum.grace_seconds(10.0, 1.0, 1.0) == 2.0
    assert quorum.grace_seconds(1.0, 2.0, 0.0) == 0.0


# ---- what is lost is counted ----


def straggling(comm, strategy, rounds):
    """Rank 1 sends its first change only after the others have committed `rounds` rounds without it."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = tw.attach(model, optimizer, strategy, comm=comm)
    protocol = handle._asynchronous.protocol
    if comm.rank == 1:
        while protocol._fragments[0].version < rounds:
            time.sleep(0.01)
    for step in range(2 * (1 if comm.rank == 1 else rounds)):
        backward(model, comm.rank, step)
        optimizer.step()
    handle.synchronize()
    handle.detach()
    return flat(model), handle.committed


@pytest.mark.parametrize("stale", ["Drop()", "PlainWeights()"])
def test_a_late_change_is_merged_or_dropped_and_counted(stale):
    strategy = tw.parse(
        f"Local(Mean(), every=2, outer=OuterSGD(), quorum=Quorum(workers=2, stale={stale}, follow_speed=False))"
    )
    results = run_threads(3, straggling, strategy, 3)
    assert all(torch.equal(x, results[0][0]) for x, _ in results)
    committed = results[0][1]
    assert (committed.num_late, committed.num_dropped) == ((0, 1) if stale == "Drop()" else (1, 0))
    assert committed.dropped_tokens == (2 if stale == "Drop()" else 0)
    assert committed.tokens + committed.dropped_tokens == 2 * (3 + 3 + 1)


def spoiled(comm, strategy):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = tw.attach(model, optimizer, strategy, comm=comm)
    for step in range(8):
        backward(model, comm.rank, step)
        optimizer.step()
        if comm.rank == 1 and step == 2:
            with torch.no_grad():
                next(model.parameters()).fill_(float("nan"))
    handle.synchronize()
    handle.detach()
    return flat(model), handle.committed


def test_a_change_that_is_not_finite_is_its_own_worker_s_loss():
    strategy = tw.parse(
        "Local(Mean(), every=2, outer=OuterSGD(), delay=1, quorum=Quorum(workers=3, follow_speed=False))"
    )
    with pytest.warns(RuntimeWarning, match="rank 1: changes were not finite"):
        results = run_threads(3, spoiled, strategy)
    assert all(torch.equal(x, results[0][0]) and x.isfinite().all() for x, _ in results)
    assert results[0][1].tokens == 2 * 8 + 8 - 2


def lying(comm, strategy, lie):
    """Rank 1 sends changes times `lie`, as if they were finite."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = tw.attach(model, optimizer, strategy, comm=comm)
    if comm.rank == 1:
        send = handle._asynchronous.send

        def send_more(fragment, parts, is_finite):
            for change in fragment.changes:
                change.mul_(lie)
            send(fragment, parts, True)

        handle._asynchronous.send = send_more
    for step in range(24):
        backward(model, comm.rank, step)
        optimizer.step()
    handle.synchronize()
    handle.detach()
    return flat(model), handle.committed


@pytest.mark.parametrize(("lie", "why"), [(-1e4, "clipped to less than half"), (float("nan"), "not finite")])
def test_a_worker_that_lies_moves_the_others_little_and_is_set_aside(lie, why):
    quorum = "quorum=Quorum(workers=4, stale=PlainWeights(), follow_speed=False, rule={})"
    text = "Local(Mean(), every=2, delay=1, " + quorum + ")"
    honest = run_threads(4, lying, tw.parse(text.format("MedianNorm()")), 1.0)[0][0]
    with pytest.warns(RuntimeWarning, match=f"rank 1 is set aside: its messages were {why} for 5 rounds"):
        results = run_threads(4, lying, tw.parse(text.format("MedianNorm(patience=5)")), lie)
    assert all(torch.equal(x, results[0][0]) and committed == results[0][1] for x, committed in results)
    x, committed = results[0]
    start = flat(make_model())
    assert (x - honest).norm() < (honest - start).norm()
    assert committed.rule.set_aside == [1] and committed.num_merged + committed.num_dropped == 4 * committed.rounds
    assert committed.num_dropped == committed.rounds - (5 if why.startswith("clipped") else 0)
    assert (committed.clipped > 1e3) == why.startswith("clipped")
    spoilt = run_threads(4, lying, tw.parse(text.format("None")), lie)[0][0]
    assert not (spoilt - honest).norm() < 10 * (honest - start).norm() or torch.equal(spoilt, start)


# ---- workers that are stuck or dead ----


def stuck(comm, strategy):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = tw.attach(model, optimizer, strategy, comm=comm)
    log = handle._asynchronous.protocol._fragments[0]
    for step in range(4):
        if comm.rank == 2 and step == 1:
            while log.version < 2:  # without progress, though its connections live
                time.sleep(0.01)
        backward(model, comm.rank, step)
        optimizer.step()
    handle.synchronize()
    handle.detach()
    return flat(model)


def test_a_worker_without_progress_holds_the_others_for_the_patience_at_most():
    strategy = tw.parse("Local(Mean(), every=2, quorum=Quorum(workers=3, stale=Drop(), patience_seconds=0.2))")
    results = run_threads(3, stuck, strategy)
    assert all(torch.equal(x, results[0]) for x in results)


def killed(comm, strategy, victim):
    model = make_model()
    optimizer = adamw(model)
    handle = tw.attach(model, optimizer, strategy, comm=comm)
    for step in range(40):
        backward(model, comm.rank, step)
        if comm.rank == victim and step == 11:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
    handle.synchronize()
    members = len(handle._asynchronous.protocol.members_at_end)
    handle.detach()
    return flat(model), members, handle.committed


@pytest.mark.parametrize("victim", [0, 2])
def test_the_others_go_on_without_a_worker_that_is_killed(victim):
    """Also without the one that decides the rounds."""
    strategy = tw.parse(
        "Local(Mean(QSGD(bits=4)), every=4, outer=OuterSGD(), fragments=2, delay=1, quorum=Quorum(workers=3))"
    )
    results = spawn(3, killed, strategy, victim, return_errors=True)
    alive = [result for rank, result in enumerate(results) if rank != victim]
    assert isinstance(results[victim], RuntimeError)
    assert not any(isinstance(result, Exception) for result in alive), alive
    assert torch.equal(alive[0][0], alive[1][0]) and alive[0][2] == alive[1][2]
    assert max(members for _, members, _ in alive) == 2  # one may have left already
    assert alive[0][2].tokens >= 2 * 2 * 40  # of two fragments


def detaches_too_early(comm):
    model = make_model()
    handle = tw.attach(model, adamw(model), tw.parse("Local(Mean(), 2, quorum=Quorum(stale=Drop()))"), comm=comm)
    with handle.average_model(), pytest.raises(ValueError, match=r"detach\(\) inside average_model\(\)"):
        handle.detach()
    comm.barrier()
    return handle


def test_detaching_ends_all_threads_though_it_fails():
    before = set(threading.enumerate())
    handles = run_threads(2, detaches_too_early)
    wait_until(lambda: set(threading.enumerate()) <= before, "the end of the threads")
    assert all(handle.is_detached for handle in handles)


# ---- saving, bytes, refusals ----


def saved_and_resumed(comm, strategy, steps, at):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = tw.attach(model, optimizer, strategy, comm=comm)
    for step in range(steps):
        backward(model, comm.rank, step)
        optimizer.step()
        if step + 1 == at:
            with pytest.raises(ValueError, match="synchronize"):
                handle.state_dict()
            handle.synchronize()
            state, weights = handle.state_dict(), flat(model).clone()
            handle.detach()
            model = make_model(seed=9)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            torch.nn.utils.vector_to_parameters(weights, model.parameters())
            handle = tw.attach(model, optimizer, strategy, comm=comm)
            handle.load_state_dict(state)
    handle.synchronize()
    handle.detach()
    return flat(model), handle.committed


def test_it_resumes_from_where_all_were_synchronized():
    strategy = tw.parse(
        "Local(Mean(TopK(0.5), ErrorFeedback()), every=3, outer=OuterSGD(), quorum=Quorum(workers=2, follow_speed=False))"
    )
    whole = run_threads(2, saved_and_resumed, strategy, 11, 100)
    resumed = run_threads(2, saved_and_resumed, strategy, 11, 7)
    assert torch.equal(resumed[0][0], resumed[1][0])
    assert resumed[0][1].tokens == whole[0][1].tokens == 22


def test_what_is_sent_is_the_encoded_changes():
    """A share is its payload and a head of less than 256 bytes; so 4 bits send an eighth of float32."""
    size, steps, every = 3, 40, 4
    sent = {}
    for codec in ("", "QSGD(bits=4), min_ndim=0"):
        strategy = tw.parse(
            f"Local(Mean({codec}), every={every}, quorum=Quorum(workers=3, stale=Drop(), follow_speed=False))"
        )
        results = run_threads(size, wide, strategy, steps)
        sent[codec] = [ledger["collectives"]["channel"]["bytes_sent"] for ledger in results]
    rounds, numel = steps // every, 64 * 64
    for few, many in zip(sent["QSGD(bits=4), min_ndim=0"], sent[""], strict=True):
        assert (size - 1) * rounds * 4 * numel < many < (size - 1) * rounds * (4 * numel + 1000)
        assert few < (size - 1) * rounds * (0.6 * numel + 1000)


def wide(comm, strategy, steps):
    model = torch.nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = tw.attach(model, optimizer, strategy, comm=comm)
    for _ in range(steps):
        model.weight.grad = torch.ones(64, 64)
        optimizer.step()
    handle.synchronize()  # else a worker that detaches first is lost to the others, who send its changes once more
    handle.detach()
    return handle.ledger.as_dict()


@pytest.mark.parametrize(
    "options, message",
    [
        ("Mean(exchange='scatter_reduce'), 4, quorum=Quorum(1)", "makes its message without the others"),
        ("Mean(RandomK(0.1, shared=True)), 4, quorum=Quorum(1)", "makes its message without the others"),
        ("PowerSGD(), 4, quorum=Quorum(1)", "makes its message without the others"),
        ("Mean(TopK(0.1), SignDescent()), 4, quorum=Quorum(1)", "momentum or signs of the mean"),
        ("Mean(), 4, alpha=0.5, delay=1, quorum=Quorum(1)", "leave out alpha"),
        ("Mean(), 4, weights=InverseNorm(), quorum=Quorum(1)", "leave out weights"),
        ("Mean(), 4, outer=OuterSGD(momentum=0.0), quorum=Quorum(1)", "DelayedNesterov"),
        ("Mean(), 4, quorum=2", "quorum must be Quorum"),
        ("Mean(), 4, quorum=Quorum(0)", "workers must be"),
    ],
)
def test_what_does_not_go_together_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        tw.parse(f"Local({options})")


def test_a_quorum_of_more_workers_than_there_are_is_refused():
    strategy = tw.parse("Local(Mean(), 4, quorum=Quorum(3, stale=Drop()))")
    with pytest.raises(ValueError, match="quorum of 3 workers cannot come of 2"):
        run_threads(2, train, strategy, 1)


def looks_while_workers_train(comm):
    model = make_model()
    optimizer = adamw(model)
    with tw.attach(model, optimizer, "asynchronous_diloco(every=4)", comm=comm) as handle:
        for epoch in range(2):
            if comm.rank == 0:  # the others are in another epoch yet
                handle.set_epoch(epoch)
            backward(model, comm.rank, epoch)
            optimizer.step()
        for what, look in {
            "average_model()": lambda: handle.average_model().__enter__(),
            "consensus_distance()": handle.consensus_distance,
            "state_dict()": handle.state_dict,
        }.items():
            with pytest.raises(ValueError, match=rf"call synchronize\(\) on all of them, then {re.escape(what)}$"):
                look()
        handle.synchronize()
        with handle.average_model():
            assert handle.consensus_distance() == 0


def test_workers_at_different_versions_are_not_compared():
    run_threads(2, looks_while_workers_train)


def test_the_notation_knows_it():
    strategy = tw.strategy.asynchronous_diloco(every=50, quorum=2, bits=4)
    assert tw.parse(repr(strategy)) == strategy and tw.parse("asynchronous_diloco(50, 2, bits=4)") == strategy
    assert not strategy.has_common_steps
    assert asynchronous.Committed().state_dict()["tokens"] == 0


ENDS_ATTACHED = """
import torch, torch.distributed as dist
import thinwire as tw
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(2, 2)
handle = tw.attach(model, torch.optim.SGD(model.parameters(), 0.1), "asynchronous_diloco(every=10)")
"""


def test_a_script_may_end_without_detaching():
    """Its threads wait in the engine while Python ends; they must not come back, which would abort the process."""
    done = subprocess.run([sys.executable, "-c", ENDS_ATTACHED], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
