"""With a quorum, every block of an epoch is committed once, whoever is slow, late, wrong or dead."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter

import pytest
import torch
from helpers.spawn import run_threads, spawn
from strategy.test_local_updates import backward, flat, make_model
from strategy.test_quorum import Clocks

import thinwire as tw
from thinwire.sampler import Block

ALL = "Local(Mean(), every=4, outer=OuterSGD(), delay=2, fragments=2, quorum=Quorum())"


class Course:
    """One worker's training on the blocks that it gets, and a log of what was committed."""

    def __init__(self, comm, strategy, num_blocks, state=None):
        self.comm, self.model = comm, make_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.handle = tw.attach(self.model, self.optimizer, tw.parse(strategy), comm=comm)
        self.sampler = tw.ElasticSampler(num_blocks, self.handle, seed=5)
        if state is not None:
            self.sampler.load_state_dict(state)
        self.committed, self.taken = [], []
        self.handle.on_commit(lambda tokens: self.committed.append(self.sampler.last_committed))

    def train(self, epochs, each=lambda: None):
        """Epochs, with `each` after each step; all meet at their ends."""
        while self.sampler.epoch < epochs:
            blocks = self.sampler.take()
            if blocks:
                self.taken += blocks
                backward(self.model, self.comm.rank, len(self.taken))
                self.optimizer.step()
                each()
            else:
                self.handle.synchronize()

    def result(self):
        found = [[(rank, list(blocks)) for rank, blocks in parts.items()] for parts in self.committed]
        state = json.loads(json.dumps(self.sampler.state_dict()))
        self.handle.detach()
        return found, self.taken, flat(self.model).clone(), self.handle.committed, state


def trained(comm, strategy, num_blocks, epochs, seconds, state=None):
    course, waits = Course(comm, strategy, num_blocks, state), random.Random(comm.rank)
    course.train(epochs, lambda: time.sleep(seconds[comm.rank] * waits.random()))
    return course.result()


def check_once(results, num_blocks, epochs):
    """All have seen the same commits, and these have each block once; returns them by worker."""
    commits = results[0][0]
    assert all(result[0] == commits and torch.equal(result[2], results[0][2]) for result in results)
    assert all(result[4] == results[0][4] for result in results)
    counted = Counter(tuple(block) for parts in commits for _, blocks in parts for block in blocks)
    expected = {(epoch, number) for epoch in epochs for number in range(num_blocks)}
    assert counted.keys() == expected and set(counted.values()) == {1}
    return Counter(rank for parts in commits for rank, blocks in parts for _ in blocks)


@pytest.mark.parametrize(
    "strategy",
    [
        ALL,
        "Local(Mean(TopK(0.5), ErrorFeedback()), every=3, outer=OuterSGD(), quorum=Quorum(workers=2))",
        "Local(Mean(), every=2, outer=OuterSGD(), delay=1, quorum=Quorum(1, stale=Drop(), grace=0.0, follow_speed=False))",
    ],
)
@pytest.mark.parametrize("num_blocks", [7, 101])
def test_every_block_is_committed_once(strategy, num_blocks):
    results = run_threads(3, trained, strategy, num_blocks, 3, [0.001, 0.001, 0.006])
    done = check_once(results, num_blocks, range(3))
    if num_blocks > 100 and "Drop" not in strategy:  # a quorum of one drops nearly all that a slow worker does
        assert all(done[rank] for rank in range(3))
    taken, committed = sum(len(result[1]) for result in results), results[0][3]
    assert (
        committed.num_dropped == 0 if "Drop" not in strategy else taken == sum(done.values()) + committed.dropped_tokens
    )


def test_a_slow_worker_does_fewer_blocks(monkeypatch):
    """With a sixth of the others' speed, one in a round of their four; in the first round its speed is not known."""

    def worker(comm):
        course = Course(comm, ALL, 101)
        course.train(3, lambda: clocks.step(comm.rank))
        return course.result()

    clocks = Clocks(monkeypatch, [0.125, 0.125, 0.75])
    done = check_once(run_threads(3, worker), 101, range(3))
    assert 2 * done[2] < min(done[0], done[1])


def test_each_epoch_has_an_order_of_its_own_and_ends_where_all_meet():
    (commits, *_), *_ = run_threads(2, trained, ALL, 30, 3, [0.001, 0.001])
    epochs = [epoch for parts in commits for _, blocks in parts for epoch, _ in blocks]
    assert epochs == sorted(epochs)
    orders = [[n for parts in commits for _, blocks in parts for e, n in blocks if e == epoch] for epoch in range(3)]
    assert orders[0] != orders[1] != orders[2]


def test_a_dropped_change_gives_its_blocks_back():
    """Rank 1 sends its first change only after the others have committed three rounds without it."""

    def waiting(comm):
        quorum = "Quorum(workers=2, stale=Drop(), follow_speed=False)"
        course = Course(comm, f"Local(Mean(), every=2, outer=OuterSGD(), quorum={quorum})", 40)
        protocol = course.handle._asynchronous.protocol
        send = course.handle._asynchronous.send

        def send_late(*args):
            while comm.rank == 1 and protocol._fragments[0].version < 3 and len(course.taken) <= 2:
                time.sleep(0.005)
            send(*args)

        course.handle._asynchronous.send = send_late
        course.train(1, lambda: time.sleep(0.002))
        return course.result()

    results = run_threads(3, waiting)
    check_once(results, 40, [0])
    committed = results[0][3]
    assert committed.num_dropped >= 1 and sum(len(r[1]) for r in results) == 40 + committed.dropped_tokens


def poisoned(comm):
    """Every change of rank 0 is not finite."""
    course = Course(comm, "Local(Mean(), every=2, outer=OuterSGD(), delay=1, quorum=Quorum(follow_speed=False))", 23)

    def spoil():
        if comm.rank == 0:
            with torch.no_grad():
                next(course.model.parameters()).fill_(float("nan"))

    course.train(2, spoil)
    return course.result()


def test_the_blocks_of_a_worker_whose_changes_never_count_are_taken_by_others():
    with pytest.warns(RuntimeWarning, match="rank 0: changes were not finite"):
        results = run_threads(3, poisoned)
    done = check_once(results, 23, range(2))
    assert done[0] == 0 and done[1] and done[2]


def greedy(comm):
    """Rank 1 wants all blocks, and says that it has done more than it has."""
    course, most = Course(comm, "Local(Mean(), every=2, quorum=Quorum(stale=PlainWeights()))", 60), []
    protocol = course.handle._asynchronous.protocol
    send = protocol.send
    if comm.rank == 1:
        protocol.send = lambda fragment, base, tokens, blocks, message: send(
            fragment, base, tokens, (blocks[0] and 10**6, 10**6), message
        )
    course.train(1, lambda: most.append(len(course.sampler._leases[1])))
    return course.result(), max(most)


def test_a_greedy_worker_gets_no_more_than_a_period_needs():
    results, most = zip(*run_threads(3, greedy), strict=True)
    done = check_once(results, 60, [0])
    assert max(most) <= 3 and done[0] and done[2]  # of two steps, and a quarter more


def killed(comm, victim, at):
    course = Course(comm, ALL, 60)

    def kill():
        time.sleep(0.001)
        if comm.rank == victim and len(course.taken) == at:
            os.kill(os.getpid(), signal.SIGKILL)

    course.train(2, kill)
    return course.result()


@pytest.mark.parametrize(("victim", "at"), [(0, 3), (2, 13)])
def test_the_blocks_of_a_killed_worker_are_given_to_the_others(victim, at):
    """Also if it decided the rounds, and before and after its first change."""
    results = spawn(3, killed, victim, at, return_errors=True)
    alive = [result for rank, result in enumerate(results) if rank != victim]
    assert not any(isinstance(result, Exception) for result in alive), alive
    done = check_once(alive, 60, range(2))
    assert done[victim] <= at


def begun(comm, num_blocks):
    """Half an epoch, and a place to save it."""
    course = Course(comm, ALL, num_blocks)
    for _ in range(6):
        course.taken += course.sampler.take()
        backward(course.model, comm.rank, len(course.taken))
        course.optimizer.step()
    course.handle.synchronize()
    return course.result()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_checkpoint_goes_on_with_any_number_of_workers(size):
    before = run_threads(2, begun, 31)
    first = check_blocks(before)
    after = run_threads(size, trained, ALL, 31, 2, [0.001] * size, before[0][4])
    second = check_blocks(after)
    assert len(first) == 12 and not first & second
    assert first | second == {(epoch, number) for epoch in range(2) for number in range(31)}


def check_blocks(results):
    blocks = [tuple(block) for parts in results[0][0] for _, some in parts for block in some]
    assert len(set(blocks)) == len(blocks)
    return set(blocks)


def fixed(comm):
    handle = tw.compress_gradients(torch.nn.Linear(1, 1), tw.Mean(), comm=comm)
    sampler = tw.ElasticSampler(20, handle, seed=5)
    taken = [block for _ in range(5) for block in sampler.take()]
    return taken, json.loads(json.dumps(sampler.state_dict()))


def test_it_goes_on_from_a_run_without_a_quorum():
    before = run_threads(2, fixed)
    after = run_threads(2, trained, ALL, 20, 1, [0.001] * 2, before[0][1])
    first = {tuple(block) for taken, _ in before for block in taken}
    assert first | check_blocks(after) == {(0, number) for number in range(20)} and len(first) == 10


def test_a_number_of_blocks_for_a_step_is_refused():
    def wrong(comm):
        course = Course(comm, ALL, 4)
        try:
            tw.ElasticSampler(4, course.handle, per_step=2)
        finally:
            course.handle.detach()

    with pytest.raises(ValueError, match="takes one block at a time, so per_step=2 means nothing; leave it out"):
        run_threads(1, wrong)
    assert Block(0, 1) == (0, 1)
