"""Every block of an epoch is committed once, also when workers are killed."""

from __future__ import annotations

import json
import random
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from helpers.elastic import sampled, serve
from helpers.program import Program, wait_until
from helpers.spawn import run_threads

import thinwire as tw
from thinwire.comm import ElasticCommunicator, Lighthouse
from thinwire.sampler import Block


def fixed(comm, num_blocks, per_step, steps):
    handle = tw.compress_gradients(torch.nn.Linear(1, 1), tw.Mean(), comm=comm)
    sampler = tw.ElasticSampler(num_blocks, handle, per_step, seed=1)
    taken = [(sampler.take(), sampler.weight) for _ in range(steps)]
    return taken, sampler.state_dict(), sampler.epoch


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_steps_have_the_same_blocks_on_any_number_of_workers(size):
    alone = run_threads(1, fixed, 10, 4, 5)[0]
    together = run_threads(size, fixed, 10, 4, 5)
    for step, (blocks, _) in enumerate(alone[0]):
        assigned = [one[0][step] for one in together]
        counted = Counter(block for taken, weight in assigned if weight > 0 for block in taken)
        assert counted == Counter(blocks)
        # The weighted mean over workers of means over blocks is the mean over all blocks.
        for block in blocks:
            total = sum(weight / len(taken) for taken, weight in assigned if block in taken)
            assert total / size == pytest.approx(1 / 4)
    blocks = [block for taken, _ in alone[0] for block in taken]
    assert sorted(blocks) == [Block(epoch, index) for epoch in range(2) for index in range(10)]
    assert alone[2] == 2 and [one[1] for one in together] == [alone[1]] * size


class Rounds:
    """Samplers as an elastic communicator would drive them, without processes: rounds, deaths and healing at random.

    A worker may join a round of several steps when the others have taken some of them.
    """

    def __init__(self, keeps, seed, monkeypatch):
        self.random, self.keeps = random.Random(seed), keeps
        monkeypatch.setattr("thinwire.sampler.ElasticCommunicator", SimpleNamespace)
        self.living, self.new = {}, 0
        for _ in range(3):
            self.join()

    def join(self):
        comm = SimpleNamespace(is_elastic=True, size=1, rank=0, in_round=True, members=None, num_skipped=0)
        comm.check_agreement, comm.share, comm.watch = (lambda *_: None,) * 3
        strategy = SimpleNamespace(has_common_steps=True, counts_commits=False, sends_again=False)
        sampler = tw.ElasticSampler(
            11,
            SimpleNamespace(
                comm=comm,
                strategy=strategy,
                models_differ=self.keeps,
                is_detached=False,
                _on_detach=lambda undo: None,
            ),
            per_step=4,
            seed=2,
        )
        if self.living:
            sampler._join(json.loads(json.dumps(next(iter(self.living.values())).state_dict())))
        dead = [number for number in range(self.new) if number not in self.living]
        number = self.random.choice([*dead, self.new])  # a number may come back
        self.new = max(self.new, number + 1)
        self.living[number] = sampler
        return sampler

    def round(self):
        """A round, which is committed by those that are left; returns the blocks that it commits."""
        late = self.join() if self.keeps and self.random.random() < 0.3 else None
        num_steps = self.random.randint(1, 3) if self.keeps else 1
        missed = self.random.randrange(num_steps)
        for step in range(num_steps):
            numbers = tuple(sorted(self.living))
            for rank, number in enumerate(numbers):
                comm = self.living[number]._comm
                comm.members, comm.rank, comm.size = SimpleNamespace(numbers=numbers), rank, len(numbers)
                if self.living[number] is late and step <= missed:
                    comm.num_skipped = step
                if self.living[number] is not late or step >= missed:
                    self.living[number].take()
        while self.random.random() < 0.3:  # the round is given up, because one has died
            if len(self.living) > 1:
                del self.living[self.random.choice(list(self.living))]
            for sampler in self.living.values():
                sampler.round_ended(None)
            if self.random.random() < 0.5:
                self.join()
            if not self.keeps:
                return []
        claims = {number: sampler.claim() for number, sampler in self.living.items()}
        for sampler in self.living.values():
            sampler.round_ended(claims)
        committed = [sampler.last_committed for sampler in self.living.values()]
        assert all(one == committed[0] for one in committed)
        if self.random.random() < 0.2 and len(self.living) > 1:
            del self.living[self.random.choice(list(self.living))]
        return [block for blocks in committed[0].values() for block in blocks]


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_random_rounds_commit_every_block_once(keeps, seed, monkeypatch):
    rounds, committed = Rounds(keeps, seed, monkeypatch), Counter()
    while next(iter(rounds.living.values())).epoch < 5:
        committed.update(rounds.round())
    for epoch in range(5):
        assert all(committed[Block(epoch, index)] == 1 for index in range(11))
    assert max(committed.values()) == 1


def test_a_worker_that_is_healed_does_not_know_the_blocks_of_the_last_round(monkeypatch):
    """It has missed that round; its own last one is an older one."""
    rounds = Rounds(False, 0, monkeypatch)
    while not rounds.round():
        pass
    healed, other = list(rounds.living.values())[:2]
    assert healed.last_committed
    healed._join(json.loads(json.dumps(other.state_dict())))
    assert healed.last_committed == {}


@pytest.mark.parametrize("strategy", ["Gradients(Mean())", "Local(Mean(), every=3)"])
def test_every_block_is_committed_once_though_workers_are_killed(strategy, tmp_path, monkeypatch):
    """The weights say it too: each block moves one of them, by a step of its own."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    num_blocks, epochs, per_step = 40, 2, 4
    place = Program(serve, 0, folder=tmp_path)
    wait_until(lambda: place.stdout.endswith("\n"), "a Lighthouse")
    address = f"http://127.0.0.1:{int(place.stdout)}"

    def start(number, is_late=False):
        return Program(sampled, address, number, strategy, num_blocks, epochs, per_step, is_late, folder=tmp_path)

    workers, killed = [start(number) for number in range(3)], []
    for victim, lines in ((0, 2), (2, 5)):  # worker 1 lives from the first round to the last
        wait_until(lambda n=lines: len(workers[1].stdout.splitlines()) >= n, "some rounds")
        workers[victim].kill()
        workers[victim].wait(400)
        killed.append(workers[victim])
        workers[victim] = start(victim, is_late=True)
    assert workers[1].wait(400) == 0, workers[1].stderr
    *rounds, end = [json.loads(line) for line in workers[1].stdout.splitlines()]
    # Of a vote in which a worker dies, worker 1 may know nothing: the others commit the round, and heal it.
    by_version = {version: parts for version, _, parts in rounds}
    for other in (workers[0], workers[2], killed[1]):
        for version, _, parts in map(json.loads, other.stdout.splitlines()[:-1]):
            by_version.setdefault(version, parts)
    assert sorted(by_version) == list(range(1, rounds[-1][0] + 1))
    committed = Counter(tuple(block) for parts in by_version.values() for _, blocks in parts for block in blocks)
    assert all(committed[epoch, index] == 1 for epoch in range(epochs) for index in range(num_blocks))
    assert max(committed.values()) == 1
    weights = torch.tensor(end["weights"])
    moved = {(i // num_blocks, i % num_blocks) for i in weights.nonzero().flatten().tolist()}
    assert moved == set(committed)
    if strategy.startswith("Gradients"):
        assert torch.allclose(weights[weights != 0], torch.tensor(-1.0), atol=1e-5)
    for worker in (workers[0], workers[2], place):
        worker.kill()
        worker.wait(60)


def test_what_cannot_be_is_refused():
    def alone(comm):
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = tw.attach(model, optimizer, "Asynchronous(Pairwise())", comm=comm)
        try:
            tw.ElasticSampler(4, handle)
        finally:
            handle.detach()

    with pytest.raises(ValueError, match="neither steps nor rounds in common; give each worker data of its own"):
        run_threads(2, alone)
    with pytest.raises(ValueError, match="num_blocks must be"):
        run_threads(1, fixed, 0, 1, 1)
    assert issubclass(ElasticCommunicator, tw.comm.Communicator)


def test_where_workers_come_and_go_the_blocks_of_a_step_are_not_guessed(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    place = Lighthouse(1, "127.0.0.1")
    with ElasticCommunicator(place.address, 0, min_workers=1) as comm:
        handle = tw.compress_gradients(torch.nn.Linear(1, 1), tw.Mean(), comm=comm)
        with pytest.raises(
            ValueError, match="per_step=None does not say how many blocks a step has; give their number"
        ):
            tw.ElasticSampler(4, handle)
        assert tw.ElasticSampler(4, handle, per_step=2).per_step == 2
    place.close()
