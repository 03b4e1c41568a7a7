"""Which changes a round merges: the protocol in a simulated network, where messages wait, and workers die at any of them."""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace

import pytest
import torch

from thinwire.comm import CommunicationError, Message
from thinwire.strategy.local import commit_protocol
from thinwire.strategy.local.quorum import Quorum


def _share(head):
    return len(head).to_bytes(8, "little") + head


class Network:
    """Delivers messages one at a time, in an order that a seed chooses; those of one worker to another stay in order."""

    def __init__(self, size, num_fragments, quorum, seed, monkeypatch, max_bytes=1000):
        self.random, self.size = random.Random(seed), size
        self.queues = {(a, b): deque() for a in range(size) for b in range(size) if a != b}
        self.dead, self.handlers = set(), {}
        network = self

        class Simulated:
            def __init__(self, comm, max_bytes, on_message, on_lost):
                self.rank, self.max_bytes = comm.rank, max_bytes
                network.handlers[comm.rank] = (on_message, on_lost)

            def start(self):
                pass

            def post(self, peer, kind, payload=None):
                assert payload is None or payload.numel() <= self.max_bytes
                if self.rank not in network.dead:
                    network.queues[self.rank, peer].append(Message(self.rank, kind, payload))

            def seconds_to_send(self, num_bytes):
                return 0.0

            def forget(self, peer):
                pass

            def close(self, wait=True):
                pass

        monkeypatch.setattr(commit_protocol, "Messenger", Simulated)
        comms = [SimpleNamespace(rank=rank, size=size) for rank in range(size)]
        self.workers = [commit_protocol.CommitProtocol(quorum, num_fragments, comm, max_bytes) for comm in comms]
        self.taken = [[[] for _ in range(num_fragments)] for _ in range(size)]

    def deliver(self):
        """One message; returns whether there was one."""
        waiting = [pair for pair, queue in self.queues.items() if queue and pair[1] not in self.dead]
        if not waiting:
            return False
        source, target = self.random.choice(waiting)
        message = self.queues[source, target].popleft()
        if message == "lost":
            self.handlers[target][1](source, "it died")
        else:
            self.handlers[target][0](message)
        self.take(target)
        return True

    def take(self, rank):
        for fragment, taken in enumerate(self.taken[rank]):
            taken += self.workers[rank].take(fragment)

    def kill(self, rank):
        """Each of the others gets the first few of the messages under way, and then notices."""
        self.dead.add(rank)
        for peer in set(range(self.size)) - {rank}:
            queue = self.queues[rank, peer]
            for _ in range(self.random.randint(0, len(queue))):
                queue.pop()
            queue.append("lost")

    def close(self):
        for worker in self.workers:
            worker.close()


def described(rounds):
    return [(r.version, [(s.worker, s.number, s.message.tolist()) for s in r.shares]) for r in rounds]


def check_gone(rounds, dead):
    """Each dead worker is gone in one round at most, and no share of it comes after that."""
    gone = [rank for r in rounds for rank in r.gone]
    assert len(set(gone)) == len(gone) and set(gone) <= dead
    for rank in gone:
        since = next(r.version for r in rounds if rank in r.gone)
        assert not any(share.worker == rank for r in rounds if r.version > since for share in r.shares)


def run(seed, kills, monkeypatch, size=5, num_fragments=2):
    """Workers send and wait at random, and `kills` of them die at random moments; returns the network when all is quiet."""
    quorum = Quorum(workers=1 + seed % size, grace=0.0, patience_seconds=1e6)
    net = Network(size, num_fragments, quorum, seed, monkeypatch)
    pending, sent = {}, [[0] * num_fragments for _ in range(size)]
    victims = net.random.sample(range(size), kills)
    moments = sorted(net.random.randint(0, 150) for _ in victims)
    for moment in range(400):
        if moments and moment == moments[0]:
            moments.pop(0)
            net.kill(victims.pop())
        rank, fragment = net.random.randrange(size), net.random.randrange(num_fragments)
        number = sent[rank][fragment]
        is_free = number == 0 or net.workers[rank]._fragments[fragment].own_ready >= number
        if moment < 300 and rank not in net.dead and is_free:
            base = len(net.taken[rank][fragment])
            message = torch.tensor([rank, number % 256], dtype=torch.uint8)
            pending[rank, fragment] = net.workers[rank].send(fragment, base, 1, (1, 1), message)
            sent[rank][fragment] += 1
            net.take(rank)
        for _ in range(net.random.randint(0, 6)):
            net.deliver()
    while net.deliver():
        pass
    for rank in set(range(size)) - net.dead:
        net.take(rank)
    return net, sent


@pytest.mark.parametrize("kills", [0, 1, 2])
@pytest.mark.parametrize("seed", range(20))
def test_all_that_live_merge_the_same_shares_in_the_same_rounds(seed, kills, monkeypatch):
    net, sent = run(100 * kills + seed, kills, monkeypatch)
    alive = [rank for rank in range(net.size) if rank not in net.dead]
    try:
        for rank in alive:
            net.workers[rank].check()
        for fragment in range(2):
            logs = [described(net.taken[rank][fragment]) for rank in alive]
            assert all(log == logs[0] for log in logs)
            gone = [[r.gone for r in net.taken[rank][fragment]] for rank in alive]
            assert all(one == gone[0] for one in gone)
            check_gone(net.taken[alive[0]][fragment], net.dead)
            assert [version for version, _ in logs[0]] == list(range(1, len(logs[0]) + 1))
            merged = [(worker, number) for _, shares in logs[0] for worker, number, _ in shares]
            assert len(set(merged)) == len(merged), "a share was merged twice"
            for _, shares in logs[0]:
                assert shares == sorted(shares)
            # Nothing that a living worker has sent is left over, unless the quorum is larger than who came.
            for rank in alive:
                left = sent[rank][fragment] - sum(worker == rank for worker, _ in merged)
                assert left in (0, 1)
    finally:
        net.close()


def test_those_who_are_cut_off_do_not_go_on_apart(monkeypatch):
    """Of five, three and two stop hearing each other: the three go on, and the two raise an error."""
    net = Network(5, 1, Quorum(workers=1, grace=0.0), 0, monkeypatch)
    few, many = (0, 1), (2, 3, 4)
    for a in few:
        for b in many:
            net.queues[a, b].append("lost")
            net.queues[b, a].append("lost")
    cut = {(a, b) for a in few for b in many} | {(b, a) for a in few for b in many}
    while net.deliver():
        for pair in cut:
            queue = net.queues[pair]
            for message in [m for m in queue if m != "lost"]:
                queue.remove(message)
    for rank in few:
        with pytest.raises(CommunicationError, match="too few workers are left"):
            net.workers[rank].check()
    for rank in many:
        net.workers[rank].check()
        assert net.workers[rank]._members == set(many)
    net.close()


def test_a_phase_ends_when_all_that_are_left_are_done(monkeypatch):
    net = Network(3, 1, Quorum(workers=3), 0, monkeypatch)
    for rank in range(3):
        with net.workers[rank]._changed:
            net.workers[rank]._done[rank] = 1
            net.workers[rank]._tell([r for r in range(3) if r != rank], {"is": "done", "phase": 1, "have": [0]})
    net.kill(0)  # the leader, before it says that the phase ends
    while net.deliver():
        pass
    assert [net.workers[rank]._ended.phase for rank in (1, 2)] == [1, 1]
    net.close()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (commit_protocol.QuorumMessage.NOTE, b"[" * 100_000),
        (commit_protocol.QuorumMessage.NOTE, b"{}"),
        (
            commit_protocol.QuorumMessage.SHARE,
            _share(b'{"share": [4, 0, Infinity, 0, 1, 0, 0], "speed": 1, "have": [0, 0]}'),
        ),
        (commit_protocol.QuorumMessage.SHARE, _share(b'{"share": [4, 0, 1, 0, 1, 0, 0], "speed": 1, "have": []}')),
        (commit_protocol.QuorumMessage.SHARE, _share(b'{"share": [4, 0, 1, 0, 1, -1, 0], "speed": 1, "have": [0, 0]}')),
        (commit_protocol.QuorumMessage.SHARE, _share(b'{"share": [4, 0, 0, 0, 1, 0, 0], "speed": 1, "have": [0, 0]}')),
        (commit_protocol.QuorumMessage.SHARE, b"\xff" * 8),
    ],
)
def test_a_worker_whose_words_cannot_be_read_is_lost_and_the_others_go_on(kind, said, monkeypatch, caplog):
    net = Network(5, 2, Quorum(grace=0.0, patience_seconds=1e6), 0, monkeypatch)
    for rank in range(4):
        net.workers[rank].send(0, 0, 1, (0, 0), torch.tensor([rank], dtype=torch.uint8))
    net.queues[4, 1].append(Message(4, kind, torch.frombuffer(bytearray(said), dtype=torch.uint8)))
    while net.deliver():
        pass
    for rank in range(4):
        net.workers[rank].check()
        ((version, shares),) = described(net.taken[rank][0])
        assert version == 1 and [worker for worker, *_ in shares] == [0, 1, 2, 3]
    assert any("rank 1 goes on without rank 4, which sent what cannot be:" in line for line in caplog.messages)
    net.close()


@pytest.mark.parametrize("is_first", [True, False])
def test_a_worker_that_sends_the_share_of_another_one_is_lost_and_the_others_merge_the_true_one(
    is_first, monkeypatch, caplog
):
    """Whether the forged share comes before the true one, or after it."""
    net = Network(5, 2, Quorum(grace=0.0, patience_seconds=1e6), 0, monkeypatch)
    forged = net.workers[4]._packed(commit_protocol.Share(2, 0, 1, 0, 1, 0, 0, torch.tensor([99], dtype=torch.uint8)))
    if is_first:
        net.handlers[1][0](Message(4, commit_protocol.QuorumMessage.SHARE, forged))
    for rank in range(4):
        net.workers[rank].send(0, 0, 1, (0, 0), torch.tensor([rank], dtype=torch.uint8))
    if not is_first:
        while net.deliver():
            pass
        net.handlers[1][0](Message(4, commit_protocol.QuorumMessage.SHARE, forged))
    while net.deliver():
        pass
    for rank in range(4):
        net.workers[rank].check()
        ((_, shares),) = described(net.taken[rank][0])
        assert shares == [(worker, 1, [worker]) for worker in range(4)]
    assert any("rank 1 goes on without rank 4, which sent what cannot be:" in line for line in caplog.messages)
    net.close()


def test_only_the_leader_ends_a_phase(monkeypatch):
    net = Network(3, 1, Quorum(), 0, monkeypatch)
    note = b'{"is": "end", "end": [9, [9], [0, 1, 2]]}'
    for source in (2, 0):
        net.handlers[1][0](
            Message(source, commit_protocol.QuorumMessage.NOTE, torch.frombuffer(bytearray(note), dtype=torch.uint8))
        )
        assert net.workers[1]._ended.phase == (9 if source == 0 else 0)
    net.close()


def test_a_share_of_one_of_many_fragments_fits_though_its_head_tells_of_all(monkeypatch):
    most = 1 << 21
    net = Network(2, 2000, Quorum(), 0, monkeypatch, most)
    for rank in range(2):
        net.workers[rank].send(1999, 0, 1, (0, 0), torch.zeros(most, dtype=torch.uint8))
    while net.deliver():
        pass
    for rank in range(2):
        (merged,) = net.taken[rank][1999]
        assert merged.version == 1 and [share.message.numel() for share in merged.shares] == [most] * 2
    net.close()
